"""Configuration files of training: what they give, and that every mistake is named by its field."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Literal

import pytest

from dsv41.config import ConfigError
from dsv41.training.config import MAY_CHANGE, TrainConfigError, flat_config, parse_config, read_config
from dsv41.training.trainer import TrainerConfig


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float
    kind: Literal["full", "cache"] = "full"
    decay: float | None = None

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ValueError(f"rate: {self.rate} is not positive")
        if self.kind == "cache" and self.decay is None:
            raise ConfigError("inner.decay: None, which cache cannot use")


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    count: int = 3
    names: tuple[str, ...] = ()
    pair: tuple[int, float] = (1, 2.0)
    file: pathlib.Path | None = None
    on: bool = dataclasses.field(default=False, metadata=MAY_CHANGE)
    limit: int | str = 0
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    extra: Inner | None = None


@dataclasses.dataclass(frozen=True)
class Root:
    trainer: TrainerConfig


INNER = {"inner": {"rate": 1}}


def test_a_file_becomes_dataclasses(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'count = 5\nnames = ["a", "b"]\npair = [4, 1]\nfile = "x/y"\non = true\nlimit = "none"\nweights = {a = 1}\n'
        '[inner]\nrate = 1e-4\nkind = "full"\n[extra]\nrate = inf\n'
    )
    config = read_config(path, Outer)
    assert config == Outer(
        Inner(1e-4), 5, ("a", "b"), (4, 1.0), pathlib.Path("x/y"), True, "none", {"a": 1.0}, Inner(float("inf"))
    )
    assert type(config.weights["a"]) is float


def test_sections_that_the_file_leaves_out_take_their_defaults():
    assert parse_config(INNER, Outer) == Outer(Inner(1.0))


def test_overrides_win_in_their_order(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("count = 5\n[inner]\nrate = 1.0\ndecay = 0.5\n")
    overrides = ["inner.rate=2", "inner.rate=3e-1", "inner.kind=full", "names=['x=1']", "file=a/b", "extra.rate=7"]
    config = read_config(path, Outer, [*overrides, "count=", "inner.decay="])
    assert config == Outer(Inner(0.3), names=("x=1",), file=pathlib.Path("a/b"), extra=Inner(7.0))
    assert read_config(path, Outer, ["extra.rate=7", "extra="]).extra is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, r"inner\.rate: is missing; a number is needed"),
        ({**INNER, "counts": 4}, r"counts: 4: no such field; did you mean count\?"),
        ({"inner": {"rate": 1, "zzz": {}}}, r"inner\.zzz: \{\}: no such section; there are rate, kind, decay"),
        ({"inner": 3}, r"inner: 3, where a section is needed"),
        ({"inner": {"rate": "1"}}, r"inner\.rate: '1', where a number is needed"),
        ({"inner": {"rate": float("nan")}}, r"inner\.rate: is not a number"),
        ({"inner": {"rate": -1}}, r"inner\.rate: -1\.0 is not positive"),
        ({"inner": {"rate": 1, "kind": "cache"}}, r"inner\.decay: None, which cache cannot use"),
        ({"inner": {"rate": 1, "kind": "cahce"}}, r"inner\.kind: 'cahce' is none of full, cache; did you mean cache\?"),
        ({**INNER, "count": True}, r"count: True, where an integer is needed"),
        ({**INNER, "count": 3.0}, r"count: 3\.0, where an integer is needed"),
        ({**INNER, "on": 1}, r"on: 1, where true or false is needed"),
        ({**INNER, "names": "a"}, r"names: 'a', where a list is needed"),
        ({**INNER, "names": ["a", 1]}, r"names\[1\]: 1, where a string is needed"),
        ({**INNER, "pair": [1]}, r"pair: \[1\] has 1 items; 2 are needed"),
        ({**INNER, "file": ""}, r"file: '', where a path is needed"),
        ({**INNER, "limit": 1.5}, r"limit: 1\.5, where an integer or a string is needed"),
        ({**INNER, "weights": {"a": "b"}}, r"weights\.a: 'b', where a number is needed"),
        ({**INNER, "extra": {}}, r"extra\.rate: is missing; a number is needed"),
        ({**INNER, "extra": {"rate": 0}}, r"extra\.rate: 0\.0 is not positive"),
    ],
)
def test_mistakes_name_the_field_and_the_value(data, message):
    with pytest.raises(TrainConfigError, match=f"^{message}$"):
        parse_config(data, Outer)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["count"], r"--set 'count': is not section\.field=value"),
        (["inner..rate=1"], r"--set 'inner\.\.rate=1': is not section\.field=value"),
        (["count.x=1"], r"--set 'count\.x=1': count is no section"),
        (["count=many"], r"count: 'many', where an integer is needed"),
        (["count=1\nnames=2"], r"count: '1\\nnames=2', where an integer is needed"),
    ],
)
def test_overrides_that_do_not_fit_are_named(tmp_path, overrides, message):
    path = tmp_path / "run.toml"
    path.write_text("count = 5\n[inner]\nrate = 1.0\n")
    with pytest.raises(TrainConfigError, match=f"^{message}$"):
        read_config(path, Outer, overrides)


def test_a_file_that_is_not_toml_is_named(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"count: 5\n")
    with pytest.raises(TrainConfigError, match=r"run\.toml: not TOML: .*line 1"):
        read_config(path, Outer)
    path.write_bytes(b"\xff")
    with pytest.raises(TrainConfigError, match=r"run\.toml: not TOML"):
        read_config(path, Outer)


def test_all_fields_lie_flat_as_json_has_them():
    config = Outer(Inner(1.0), names=("a",), file=pathlib.Path("x"), extra=Inner(2.0, decay=0.1))
    flat = flat_config(config)
    assert flat["extra.decay"] == 0.1
    assert (flat["names"], flat["file"], flat["on"]) == (["a"], "x", False)
    assert flat.keys() - flat_config(config, changeable=False).keys() == {"on"}
    assert flat_config(dataclasses.replace(config, extra=None))["extra"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps: 0 is not above 0"),
        ({"save_every": -1}, "save_every: -1 is not above 0"),
        ({"evaluate_every": -2}, "evaluate_every: -2 is below 0"),
        ({"ema": 1}, r"ema: 1\.0 is outside \[0, 1\)"),
        ({"on_nan": "ignore"}, "on_nan: 'ignore' is none of stop, skip"),
    ],
)
def test_impossible_trainer_values_are_named(fields, message):
    with pytest.raises(TrainConfigError, match=f"^trainer\\.{message}$"):
        parse_config({"trainer": {"steps": 5} | fields}, Root)
