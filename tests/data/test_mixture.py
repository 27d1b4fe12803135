"""Several weighted sources: shares, epochs, names, agreement, and what users get wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support import TEXT_SPECS, text_samples

from maestro_jax.config import load
from maestro_jax.data import ArraySpec, Batches, Corpus, Dataset, Jsonl, Mixture, Part, Sample
from maestro_jax.data.batches import heldout_places
from maestro_jax.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """A source of `count` samples, a fifth as many held out."""

    count: int = 20
    name: str | None = None
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    def load(self) -> Dataset:
        samples = text_samples(self.count + self.count // 5)
        made = {"train": samples[: self.count], "heldout": samples[self.count :], "specs": TEXT_SPECS, "vocab_size": 16}
        return Dataset(**{**made, "tokenizer_fingerprint": "f00", "skipped": {"empty": 1}, **self.fields})


def mixed(*sources: Any, weights: tuple[float, ...] = ()) -> Dataset:
    return Mixture(sources=sources, weights=weights).load()


def source_of(sample: Sample) -> str:
    return sample.id.rsplit("/", 1)[0]


def test_samples_come_in_proportion_to_the_weights() -> None:
    batches = Batches(mixed(Made(name="a"), Made(name="b"), weights=(3, 1)), 8, seed=0)
    for step in range(20):
        names = [source_of(sample) for sample in batches(step)]
        assert (names.count("a"), names.count("b")) == (6, 2)


def test_no_weights_are_equal_shares_whatever_the_sizes() -> None:
    data = mixed(Made(count=50, name="a"), Made(count=10, name="b"))
    assert [source_of(sample) for sample in Batches(data, 2, seed=0)(0)] == ["a", "b"]


def test_a_small_source_repeats_while_a_large_one_has_not_ended() -> None:
    data = mixed(Made(count=100, name="large"), Made(count=4, name="small"))
    batches = Batches(data, 4, seed=0)
    assert batches.steps_per_epoch == 50
    seen = [sample.id for step in range(50) for sample in batches(step)]
    assert len(set(seen)) == 104
    assert {seen.count(f"small/s{n}") for n in range(4)} == {25}


def test_names_come_from_fields_or_classes_and_make_ids_unique() -> None:
    dataset = Made().load()
    data = mixed(Made(name="chat"), Made(), Made(), dataset, Made(name="chat"))
    assert list(dict.fromkeys(source_of(sample) for sample in data.train)) == ["chat", "Made", "Made-2", "Dataset", "chat-2"]
    assert [sample.id for sample in data.train[:2]] == ["chat/s0", "chat/s1"]


def test_contents_are_those_of_the_sources() -> None:
    data = mixed(Made(name="a"), Made(name="b"))
    for made, sample in zip([*text_samples(20)] * 2, data.train, strict=True):
        assert sample.items["text"][0].arrays["tokens"].tolist() == made.items["text"][0].arrays["tokens"].tolist()


def test_heldout_data_come_one_source_after_another() -> None:
    data = mixed(Made(count=10, name="a"), Made(count=5, name="b"))
    assert [[data.heldout[place].id for place in places] for places in heldout_places(data, 2)] == [["a/s10", "a/s11"], ["b/s5"]]


def test_counts_and_facts_carry_the_names_of_their_sources() -> None:
    notes = {"tokenizer": "own.json", "documents": "3"}
    data = mixed(Made(name="a", fields={"notes": notes}), Made(name="b"), weights=(2, 1))
    assert data.skipped == {"a: empty": 1, "b: empty": 1}
    assert data.notes == {"weights": "2.0, 1.0", "tokenizer": "own.json", "a.tokenizer": "own.json", "a.documents": "3"}
    assert (data.vocab_size, data.tokenizer_fingerprint) == (16, "f00")


def test_a_mixture_in_a_mixture_keeps_its_weights() -> None:
    inner = Mixture(sources=(Made(name="a"), Made(name="b")), weights=(3, 1))
    data = mixed(inner, Made(name="c"), weights=(1, 1))
    assert data.parts == (Part("Mixture/a", 20, 0.75), Part("Mixture/b", 20, 0.25), Part("c", 20, 1.0))


def test_order_does_not_depend_on_what_else_is_loaded() -> None:
    one, two = (Batches(mixed(Made(name="a"), Made(name=name)), 4, seed=0) for name in ("b", "c"))
    assert [[sample.id for sample in one(step)[:2]] for step in range(9)] == [[sample.id for sample in two(step)[:2]] for step in range(9)]


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    batches = Batches(mixed(Made(name="a"), Made(name="b")), 20, seed=0)
    numbers = [sample.id.rsplit("/", 1)[1] for sample in batches(0)]
    assert numbers[:10] != numbers[10:]


def test_corpus_and_json_lines_mix_from_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"text": f"chat number {n}"}) for n in range(30)))
    (tmp_path / "run.gin").write_text(
        "Mixture.sources = (@Corpus(), @chat/Jsonl())\nMixture.weights = (3, 1)\nchat/Jsonl.path = 'chats.jsonl'\n"
    )
    data = load(str(tmp_path / "run.gin"), root="Mixture").build().load()
    assert [source_of(sample).split("/")[0] for sample in Batches(data, 4, seed=0)(0)] == ["Corpus"] * 3 + ["chat"]
    assert data.tokenizer_fingerprint == Corpus().load().tokenizer_fingerprint


# --- mistakes


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"vocab_size": 17}, "vocab_size"),
        ({"tokenizer_fingerprint": "other"}, "tokenizer_fingerprint"),
        ({"specs": {"text": {"tokens": ArraySpec()}}}, "arrays of stream 'text'"),
    ],
)
def test_sources_that_disagree_are_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(DataError, match=f"'a' and 'b' cannot be mixed: they differ in .*{what}") as caught:
        mixed(Made(name="a"), Made(name="b", fields=fields))
    assert caught.value.anchor == "sources-disagree"
    assert caught.value.set_by == "the calling program: Mixture.sources"


def test_sources_of_different_streams_agree() -> None:
    image = {"image": {"patches": ArraySpec(shape=(4,), dtype="float32")}}
    data = mixed(Made(name="a"), Made(name="b", fields={"specs": image, "vocab_size": None, "tokenizer_fingerprint": None}))
    assert data.specs == {**TEXT_SPECS, **image}
    assert data.vocab_size == 16


def test_a_source_too_small_for_its_weight_is_refused() -> None:
    data = mixed(Made(count=50, name="large"), Made(count=5, name="small"))
    with pytest.raises(DataError, match="source 'small' has too few") as caught:
        Batches(data, 12, seed=0, set_by="kd.gin:3  train.batch")
    assert caught.value.have == "5, and a step takes 6 of its 12 samples from them"
    assert caught.value.set_by == "kd.gin:3  train.batch"
    assert caught.value.anchor == "mixture-source-too-small"
    assert len(Batches(data, 10, seed=0)(0)) == 10


ONE = Made()


@pytest.mark.parametrize(
    ("sources", "weights", "have"),
    [
        ((), (), "none"),
        ((Made(), Made), (), "the class Made itself"),
        ((Made(), "texts"), (), "source 1 is 'texts'"),
        ((ONE, Made(), ONE), (), "source 2 is an earlier one again, a Made"),
        ((Made(), Made()), (1.0,), "1 weights"),
        ((Made(), Made()), (1.0, 0.0), "0.0"),
        ((Made(), Made()), (1.0, -1.0), "-1.0"),
        ((Made(), Made()), (1.0, float("inf")), "inf"),
        ((Made(), Made()), (1.0, float("nan")), "nan"),
    ],
)
def test_impossible_sources_and_weights_are_refused(sources: tuple[Any, ...], weights: tuple[float, ...], have: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Mixture(sources=sources, weights=weights)
    assert have in caught.value.have
    assert caught.value.anchor == "mixture-value"


def test_one_object_for_two_sources_in_a_config_file_asks_for_scopes(tmp_path: Path) -> None:
    (tmp_path / "run.gin").write_text("Mixture.sources = (@Jsonl(), @Jsonl())\nJsonl.path = 'a.jsonl'\n")
    with pytest.raises(ConfigError, match=r"@chat/Jsonl\(\)") as caught:
        load(str(tmp_path / "run.gin"), root="Mixture").build()
    assert "run.gin:1" in caught.value.set_by
    assert Mixture(sources=(Jsonl(path="a.jsonl"), Jsonl(path="a.jsonl"))).weights == ()
