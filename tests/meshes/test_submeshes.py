"""Sections get disjoint devices, unless they name one submesh; too few devices are explained or shared."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from maestro_jax.errors import MeshError
from maestro_jax.meshes import Request, carve, devices_wanted, shrink

TEACHER = Request(
    section="teacher", submesh="teacher", replicas=1, axes={"tensor": 2}, origin="configs/kd_tiny.gin:9  teacher/Section.axes"
)
STUDENT = Request(
    section="student", submesh="student", replicas=4, axes={"tensor": 2}, origin="configs/kd_tiny.gin:14  student/Section.submesh"
)


def request(section: str, replicas: int = 1, submesh: str | None = None, **axes: int) -> Request:
    return Request(section=section, submesh=submesh or section, replicas=replicas, axes=axes)


def numbers(devices: np.ndarray) -> list[int]:
    return [d.id for d in devices.flat]


@pytest.mark.quick
def test_submeshes_take_devices_in_order_and_share_none() -> None:
    found = carve([TEACHER, request("middle"), request("student", 2, tensor=2)], jax.devices())
    assert {name: numbers(s.mesh.devices) for name, s in found.items()} == {"teacher": [0, 1], "middle": [2], "student": [3, 4, 5, 6]}


def test_axes_have_one_order_and_type_auto() -> None:
    mesh = carve([request("a", 2, tensor=2, data=2)], jax.devices())["a"].mesh
    assert mesh.axis_names == ("replica", "data", "fsdp", "sequence", "expert", "tensor")
    assert mesh.devices.shape == (2, 2, 1, 1, 1, 2)
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_replicas_are_meshes_of_their_own() -> None:
    submesh = carve([request("a", 3, tensor=2)], jax.devices())["a"]
    assert submesh.replicas == 3
    assert [numbers(mesh.devices) for mesh in submesh.replica_meshes] == [[0, 1], [2, 3], [4, 5]]
    assert [[d.id for d in submesh.replica_devices(r)] for r in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert submesh.replica_meshes[0].axis_names == submesh.axes == ("fsdp", "sequence", "expert", "tensor")


def test_shardings_cover_all_replicas_or_one() -> None:
    submesh = carve([request("a", 2, tensor=2)], jax.devices())["a"]
    spec = PartitionSpec("tensor")
    assert submesh.whole(spec).shard_shape((8,)) == submesh.in_replica(1, spec).shard_shape((8,)) == (4,)
    assert {d.id for d in submesh.whole(spec).device_set} == {0, 1, 2, 3}
    assert {d.id for d in submesh.in_replica(1, spec).device_set} == {2, 3}


@pytest.mark.quick
def test_sections_of_one_submesh_share_its_devices() -> None:
    requests = [request("a", 2, "both"), request("b"), request("c", 1, "both", tensor=3)]
    assert devices_wanted(requests) == 4
    found = carve(requests, jax.devices())
    assert {name: numbers(s.mesh.devices) for name, s in found.items()} == {"a": [0, 1], "b": [3], "c": [0, 1, 2]}


@settings(derandomize=True, deadline=None, max_examples=50)
@given(sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([None, "x", "y"])), min_size=1, max_size=4))
def test_disjoint_submeshes_never_overlap(sizes: list[tuple[int, int, str | None]]) -> None:
    requests = [request(f"s{n}", replicas, submesh, tensor=tensor) for n, (replicas, tensor, submesh) in enumerate(sizes)]
    devices = list(range(devices_wanted(requests)))
    if len(devices) > 8:
        with pytest.raises(MeshError):
            carve(requests, jax.devices())
        return
    found = carve(requests, jax.devices()[: len(devices)])
    for one in requests:
        assert found[one.section].mesh.size == one.devices
        for other in requests:
            shared = set(numbers(found[one.section].mesh.devices)) & set(numbers(found[other.section].mesh.devices))
            assert bool(shared) == (one.submesh == other.submesh)


@pytest.mark.quick
def test_too_few_devices_are_explained() -> None:
    with pytest.raises(MeshError) as caught:
        carve([TEACHER, STUDENT], jax.devices())
    assert str(caught.value) == (
        "section 'student' cannot be placed.\n"
        "  wanted   replica=4 x tensor=2 = 8 devices\n"
        "  have     6 devices left after 'teacher' took 0-1 of 8\n"
        "  set by   configs/kd_tiny.gin:14  student/Section.submesh\n"
        "  fix      lower replicas or an axis, let sections name one submesh, or give them fewer devices; --dry_run shows the plan\n"
        "  help     docs/errors.md#mesh-too-small"
    )


@pytest.mark.parametrize(
    ("requests", "wanted", "have"),
    [
        ([request("a", 9)], "replica=9 = 9 devices", "8 devices"),
        ([request("a", 1, tensor=16)], "replica=1 x tensor=16 = 16 devices", "8 devices"),
        ([request("a", 7), request("b", 2)], "replica=2 = 2 devices", "1 device left after 'a' took 0-6 of 8"),
        ([request("a"), request("b", 7), request("c")], "replica=1 = 1 device", "no device left after 'a' took 0, 'b' took 1-7 of 8"),
    ],
)
def test_text_counts_what_is_left_and_who_took_the_rest(requests: list[Request], wanted: str, have: str) -> None:
    with pytest.raises(MeshError) as caught:
        carve(requests, jax.devices())
    assert (caught.value.wanted, caught.value.have) == (wanted, have)


def test_on_a_shared_submesh_the_largest_request_is_blamed() -> None:
    with pytest.raises(MeshError, match="section 'large' cannot be placed") as caught:
        carve([request("small", 1, "both"), request("large", 16, "both")], jax.devices())
    assert caught.value.wanted == "replica=16 = 16 devices"


@pytest.mark.quick
def test_shrink_changes_nothing_when_devices_suffice() -> None:
    assert shrink([TEACHER, STUDENT], 10) == ([TEACHER, STUDENT], [])


def test_shrink_shares_devices_and_says_so() -> None:
    requests, notes = shrink([TEACHER, STUDENT], 4)
    assert [(r.submesh, r.replicas, dict(r.axes)) for r in requests] == [("shared", 1, {"tensor": 2}), ("shared", 2, {"tensor": 2})]
    assert notes == [
        "the plan asks for 10 devices and there are 4: sections share them and take turns",
        "section 'student': replicas=4 lowered to 2",
    ]


def test_shrink_to_one_device() -> None:
    requests, notes = shrink([TEACHER, STUDENT], 1)
    assert [(r.replicas, dict(r.axes)) for r in requests] == [(1, {"tensor": 1}), (1, {"tensor": 1})]
    assert notes[1:] == [
        "section 'teacher': tensor=2 lowered to 1",
        "section 'student': tensor=2 lowered to 1, replicas=4 lowered to 1",
    ]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(replicas=st.integers(1, 6), tensor=st.integers(1, 6), fsdp=st.integers(1, 6), available=st.integers(1, 8))
def test_shrunken_requests_fit_and_divide_the_axes(replicas: int, tensor: int, fsdp: int, available: int) -> None:
    asked = [request("a", replicas, fsdp=fsdp, tensor=tensor), request("b")]
    fitted, _ = shrink(asked, available)
    assert devices_wanted(fitted) <= available
    for before, after in zip(asked, fitted, strict=True):
        assert after.replicas <= before.replicas
        assert all(before.axes[axis] % size == 0 for axis, size in after.axes.items())
        assert math.prod(after.axes.values()) == after.per_replica
