"""Fixtures that tests share: the two small golden models, once a session."""

from __future__ import annotations

import functools
import gc
import os
import pathlib

import jax
import pytest

from dsv41.config import load_config
from dsv41.model import Model
from dsv41.settings import Settings
from dsv41.verification.golden import Golden
from tests.fixtures_engine import (  # noqa: F401 (fixtures)
    default_engine,
    drafting_engine,
    random_engines_made_once,
    small_checkpoint,
    small_engine,
)

GOLDEN = pathlib.Path(__file__).parent / "data" / "golden"
PAGE_TOKENS = 8

# Compiling is most of the suite's time: both test processes, the notebooks' kernels and the next run share what was
# compiled. A program is found again by its own text, so changed code never meets an old program.
# Optimised code takes longer to compile, and these small models hardly run faster by it: LLVM optimises nothing here.
# XLA has no unoptimised code for GPUs. Fusions emitted without MLIR compile sooner too, where XLA can still do so; a
# value may then round differently in different programs: a test that compares two bit for bit asks for ROUNDING_ALIKE.
# Eight devices, of which only tests of meshes use more than the first.
_DEVICES = "--xla_force_host_platform_device_count=8"
_FAST_COMPILING = "--xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0"
ROUNDING_ALIKE: dict[str, bool] = {}
if jax.__version_info__ < (0, 11):
    # Programs are not cut for several threads: the other process has work for the other core.
    _FAST_COMPILING += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    ROUNDING_ALIKE["xla_cpu_use_fusion_emitters"] = True
if os.environ.get("JAX_PLATFORMS") == "cpu" or not pathlib.Path("/dev/nvidiactl").exists():
    # The last of two equal flags holds: what the environment says.
    os.environ["XLA_FLAGS"] = f"{_DEVICES} {_FAST_COMPILING} {os.environ.get('XLA_FLAGS', '')}"
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parent.parent / ".pytest_cache" / "compiled")
)
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
# Tracing makes many objects that live long: Python would look through all of them for garbage again and again.
gc.set_threshold(500_000, 50, 100)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-chip", action="store_true", help="compile the longest TPU programs for every chip too")


# A process keeps what it has traced and compiled: files that use the same programs go to one, the longest first.
_TOGETHER = {
    "engines": (
        "test_cli.py",
        "test_generate.py",
        "test_speculative_engine.py",
        "test_acceptance_eval.py",
        "test_picture_prompts.py",
        "test_nano.py",
    ),
    "checkpoints": (
        "test_checkpoint.py",
        "test_checkpoint_load.py",
        "test_checkpoint_refusals.py",
        "test_random_weights.py",
    ),
    "states": ("test_invariants.py", "test_faults.py", "test_engram_steps.py", "test_evaluation.py"),
}
_FIRST = (
    "test_verify.py",
    "engines",
    "states",
    "test_notebooks.py",
    "test_train_mesh.py",
    "test_quality.py",
    "test_training_forward.py",
    "test_training_dspark.py",
    "test_speculation.py",
    "test_tpu_aot.py",
    "test_sharded_steps.py",
)
_GROUPS = {name: group for group, names in _TOGETHER.items() for name in names}


def _group(file: str) -> str:
    return _GROUPS.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Gives each process whole groups for ``--dist loadgroup``; the plugin's own marks do nothing under pytest 9."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(pathlib.PurePath(nodeid.partition("::")[0]).name)

    return ByGroup(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest groups first; tests marked ``gpu`` are skipped where there is none."""

    def place(item: pytest.Item) -> int:
        group = _group(item.path.name)
        return _FIRST.index(group) if group in _FIRST else len(_FIRST)

    items.sort(key=place)
    if any(item.get_closest_marker("gpu") for item in items) and jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU in this process"))


# A compiled program is dozens of memory mappings, of which Linux allows a process 65,530: beyond them XLA crashes.
_MAPPINGS = pathlib.Path("/proc/self/maps")
_MANY_MAPPINGS = 50_000


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between files, programs are dropped when there are many; those that are wanted again come from the cache."""
    if (nextitem is not None and nextitem.path == item.path) or not _MAPPINGS.exists():
        return
    with _MAPPINGS.open("rb") as mappings:
        if sum(1 for _ in mappings) > _MANY_MAPPINGS:
            jax.clear_caches()
            gc.collect()


@functools.cache
def float_model(name: str, cache_rounding: bool) -> tuple[Model, dict]:
    """A golden model in float32, its weights dequantised from the packed checkpoint (the repository's one copy).

    The variables of one golden are shared by both settings of the cache rounding.
    """
    config = load_config(GOLDEN / name / "f32")
    model = Model(Settings.default(config, cache_rounding=cache_rounding, page_tokens=PAGE_TOKENS))
    return model, _float_variables(name)


@functools.cache
def _float_variables(name: str) -> dict:
    model = Model(Settings.default(load_config(GOLDEN / name / "f32"), page_tokens=PAGE_TOKENS))
    return Golden(GOLDEN / name / "f32", checkpoint=GOLDEN / name / "fp8").variables(model)


@pytest.fixture(scope="session")
def golden_dir() -> pathlib.Path:
    """The golden data: ``{mini8,tiny40}/{f32,fp8}``."""
    return GOLDEN


@pytest.fixture(scope="session")
def smooth_mini8() -> tuple[Model, dict]:
    """mini8 in float32 with cache rounding off: equal to 1e-4 whatever the chunking."""
    return float_model("mini8", cache_rounding=False)


@pytest.fixture(scope="session")
def rounded_mini8() -> tuple[Model, dict]:
    """mini8 in float32 with cache rounding on: packed pages and rings as in use."""
    return float_model("mini8", cache_rounding=True)
