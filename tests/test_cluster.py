"""Who takes part in a run, which devices each takes, and on which interface it listens."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from process_support import launched, processes

from maestro_jax import places
from maestro_jax.cluster import connect, own_address
from maestro_jax.errors import ClusterError
from maestro_jax.places import Place, find_place, gpus

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[03-04],other7",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "10",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}
SLURM_COORDINATOR = "node03:61441"  # JAX makes the port from the job's number.
# What a notebook or a shell inside `salloc` sees: the allocation has 16 tasks, this step is one of them.
ALLOCATION = {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
OF_JAX = {"JAX_COORDINATOR_ADDRESS": "head:1234", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
OURS = {"MAESTRO_COORDINATOR": "127.0.0.1:1234", "MAESTRO_PROCESSES": "2", "MAESTRO_PROCESS": "1"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}

GATHER = (
    "from maestro_jax.cluster import connect\nimport jax, numpy as np\n"
    "from jax.sharding import NamedSharding, PartitionSpec as P\n"
    "group = connect()\ndevices = jax.devices()\n"
    "mesh = jax.make_mesh((len(devices),), ('x',))\n"
    "whole = np.arange(8.0, dtype=np.float32)\n"
    "array = jax.make_array_from_callback((8,), NamedSharding(mesh, P('x')), lambda at: whole[at])\n"
    "total = float(jax.jit(lambda a: a.sum())(array))\n"
    "group.transport\ngroup.all_gather('ready', None)\n"
    "say(folder, f'found-{group.index}', f'{total} {len(jax.local_devices())} {len(devices)} {sorted(listening())}')\n"
    "group.all_gather('end', None)\n"
)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which nothing starts several processes."""
    starts = ("SLURM_", "OMPI_", "PMI_", "MPI_", "MAESTRO_", "KUBERNETES_", "JOB_COMPLETION")
    for name in os.environ:
        if name.startswith(starts) or name in {*OF_JAX, "JAX_LOCAL_DEVICE_IDS", "JAX_COORDINATOR_PORT", "CUDA_VISIBLE_DEVICES"}:
            monkeypatch.delenv(name)
    return monkeypatch


def found(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Place | None:

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return find_place(os.environ)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        ALLOCATION,
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_JOB_ID": "4097", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {**POD, "JAX_NUM_PROCESSES": "1"},
        {**OURS, "MAESTRO_PROCESSES": "1", "MAESTRO_PROCESS": "0"},
    ],
    ids=["plain shell", "shell of an allocation", "step of one task", "batch script", "one rank", "pod", "one pod of a job", "one of ours"],
)
def test_one_process_stays_alone(environment: dict[str, str], variables: pytest.MonkeyPatch) -> None:
    assert found(variables, environment) is None
    assert connect().count == 1


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        (OURS, Place("127.0.0.1:1234", 2, 1)),
        ({**SLURM, **OURS}, Place("127.0.0.1:1234", 2, 1)),
        (OF_JAX, Place("head:1234", 3, 2)),
        ({**POD, **OF_JAX}, Place("head:1234", 3, 2)),
        (SLURM, Place(SLURM_COORDINATOR, 16, 10)),
        ({**SLURM, "JAX_COORDINATOR_PORT": "7000"}, Place("node03:7000", 16, 10)),
        ({**SLURM, "JAX_COORDINATOR_ADDRESS": "10.0.0.9:99"}, Place("10.0.0.9:99", 16, 10)),
        (OPEN_MPI, Place("10.96.0.1:62624", 4, 3)),
        ({**SLURM, **OPEN_MPI}, Place("10.96.0.1:62624", 4, 3)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "4", **OPEN_MPI}, Place("10.96.0.1:62624", 4, 3)),  # mpirun, which starts its helpers by srun
        ({**SLURM, "PMI_SIZE": "16", "PMI_RANK": "10"}, Place(SLURM_COORDINATOR, 16, 10)),
        ({"PMI_SIZE": "4", "PMI_RANK": "0", "JAX_COORDINATOR_ADDRESS": "head:99"}, Place("head:99", 4, 0)),
    ],
)
def test_several_processes_find_each_other(environment: dict[str, str], wanted: Place, variables: pytest.MonkeyPatch) -> None:
    assert found(variables, environment) == wanted


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"MAESTRO_COORDINATOR": "a:1"}, "MAESTRO_PROCESSES as a whole number"),
        ({**OURS, "MAESTRO_PROCESSES": "two"}, "'two'"),
        ({**OURS, "MAESTRO_PROCESS": "2"}, "MAESTRO_PROCESS below MAESTRO_PROCESSES"),
        ({**OURS, "MAESTRO_COORDINATOR": "head"}, "MAESTRO_COORDINATOR as HOST:PORT"),
        ({**OURS, "MAESTRO_COORDINATOR": "head:65536"}, "MAESTRO_COORDINATOR as HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "head:1234"}, "JAX_NUM_PROCESSES as a whole number"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "JAX_COORDINATOR_ADDRESS as HOST:PORT"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""} | {"SLURM_PROCID": ""}, "SLURM_PROCID as a whole number"),
        ({name: value for name, value in SLURM.items() if name != "SLURM_JOB_ID"}, "SLURM_JOB_ID, as srun sets it"),
        ({name: value for name, value in OPEN_MPI.items() if "uri" not in name}, "JAX_COORDINATOR_ADDRESS=HOST:PORT of rank 0"),
        (POD, "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID, or the package kubernetes"),
        ({**OURS, "JAX_LOCAL_DEVICE_IDS": "0,x"}, "JAX_LOCAL_DEVICE_IDS as whole numbers"),
    ],
)
def test_an_incomplete_environment_names_the_variables(environment: dict[str, str], named: str, variables: pytest.MonkeyPatch) -> None:
    variables.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(ClusterError) as error:
        found(variables, environment)
    assert named in str(error.value)
    assert error.value.anchor == "cluster-environment"


@pytest.mark.parametrize(
    ("more", "seen", "wanted"),
    [
        ({}, 8, (2,)),  # a process for each GPU, all of which it sees
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x4)"}, 8, (4, 5)),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_LOCALID": "0"}, 8, None),  # one process for the node: all of its GPUs
        ({"SLURM_GPUS_PER_TASK": "1"}, 1, None),  # Slurm shows each process its own
        ({"SLURM_GPUS_PER_TASK": "h100:2"}, 2, None),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu:h100=2"}, 2, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,8,4"}, 8, (2,)),
        ({"JAX_LOCAL_DEVICE_IDS": "5,7"}, 8, (5, 7)),
        ({}, 0, None),
    ],
)
def test_processes_of_a_node_share_its_gpus(
    more: dict[str, str], seen: int, wanted: tuple[int, ...] | None, variables: pytest.MonkeyPatch
) -> None:
    variables.setattr(places, "gpus", lambda environment: seen)
    place = found(variables, {**SLURM, **more})
    assert place is not None
    assert place.accelerators == wanted


def test_gpus_that_cannot_be_shared_equally_are_refused(variables: pytest.MonkeyPatch) -> None:
    variables.setattr(places, "gpus", lambda environment: 6)
    with pytest.raises(ClusterError, match="as many GPUs for each of the 8 processes"):
        found(variables, SLURM)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [({"CUDA_VISIBLE_DEVICES": "0,3"}, 2), ({"CUDA_VISIBLE_DEVICES": ""}, 0), ({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}, 0)],
)
def test_gpus_are_counted_as_cuda_shows_them(environment: dict[str, str], wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: object())
    assert gpus(environment) == wanted


def test_with_a_coordinator_on_the_loopback_all_is_there(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("MAESTRO_INTERFACE", "no-such-interface")
    assert {own_address(host) for host in ("127.0.0.1", "localhost", "127.0.1.1")} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("MAESTRO_INTERFACE", "no-such-interface", "'no-such-interface'; there are "),
        *((("MAESTRO_ADDRESS", everywhere, "an IPv4 address of this machine")) for everywhere in ("0.0.0.0", "0", "")),
        ("MAESTRO_ADDRESS", "203.0.113.7", "an IPv4 address of this machine"),
    ],
)
def test_an_interface_that_others_cannot_reach_is_refused(name: str, value: str, named: str, variables: pytest.MonkeyPatch) -> None:
    variables.setenv(name, value)
    with pytest.raises(ClusterError, match="which network interface") as error:
        own_address("head")
    assert named in str(error.value)
    assert error.value.anchor == "cluster-interface"


def test_an_interface_is_found_by_its_name(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("MAESTRO_INTERFACE", "lo")
    assert own_address("head") == "127.0.0.1"


def test_a_local_launch_listens_on_the_loopback_alone_and_asks_no_proxy(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    code, _, errors = launched(tmp_path, GATHER, "--devices_per_process=2", http_proxy=nowhere, https_proxy=nowhere)
    assert code == 0, errors
    assert [(tmp_path / f"found-{n}").read_text() for n in range(2)] == ["28.0 2 4 ['127.0.0.1']"] * 2


def test_otherwise_every_port_is_on_one_named_interface(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 1))
        except OSError:
            pytest.skip("this machine has the loopback alone")
        address = probe.getsockname()[0]
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((address, 0))
        coordinator = f"{address}:{reserved.getsockname()[1]}"
        everyone = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": "2"}
        with processes(GATHER, tmp_path, [{**everyone, "JAX_PROCESS_ID": str(n)} for n in range(2)]) as started:
            assert [process.wait(60) for process in started] == [0, 0]
    assert [(tmp_path / f"found-{n}").read_text() for n in range(2)] == [f"28.0 1 2 ['{address}']"] * 2


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_to_which_nobody_comes_says_so(index: int, tmp_path: Path) -> None:
    """JAX alone would abort it (SIGABRT), with a trace of C++ calls."""
    code = (
        "from maestro_jax.cluster import connect\nfrom maestro_jax.errors import ClusterError\n"
        "try:\n    connect(seconds=2)\nexcept ClusterError as error:\n    print(error)\n    sys.exit(2)"
    )
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        place = {**OURS, "MAESTRO_COORDINATOR": f"127.0.0.1:{reserved.getsockname()[1]}", "MAESTRO_PROCESS": str(index)}
        with processes(code, tmp_path, [place]) as [process]:
            out, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"process {index} of 2 cannot connect with the others." in out
    assert "docs/errors.md#cluster-connect" in out


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_without_a_launcher_a_dead_process_ends_all_within_a_minute(killed: int, tmp_path: Path) -> None:
    code = (
        "from maestro_jax.cluster import connect\ngroup = connect()\ngroup.all_gather('a', 1)\n"
        f"if group.index == {killed}: os.kill(os.getpid(), 9)\ngroup.all_gather('b', 1)"
    )
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        everyone = {**OURS, "MAESTRO_COORDINATOR": f"127.0.0.1:{reserved.getsockname()[1]}", "MAESTRO_PROCESSES": "3"}
        with processes(code, tmp_path, [{**everyone, "MAESTRO_PROCESS": str(n)} for n in range(3)]) as started:
            started[killed].wait(60)
            begun = time.monotonic()
            codes = [process.wait(90) for process in started]
    assert time.monotonic() - begun < 60
    assert 0 not in codes
