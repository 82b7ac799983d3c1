"""Every parameter with its part on a device, from the checkpoint's layout: tracing the modules would take seconds."""

from __future__ import annotations

import dataclasses
import functools
import math

from dsv41.checkpoint.layout import STORAGE_BYTES, TensorSpec, checkpoint_layout
from dsv41.settings import Settings
from dsv41.sharding.mesh import MeshPreset
from dsv41.sharding.rules import part_shape, partition

_NORM = ("embed",)
_SHARED = {"w1": ("mlp", "embed"), "w3": ("mlp", "embed"), "w2": ("embed", "mlp")}
_ROUTED = {"w1": ("expert_mlp", "embed"), "w3": ("expert_mlp", "embed"), "w2": ("embed", "expert_mlp")}
_AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", "embed"),
    "head": ("vocab", "embed"),
    "norm": _NORM,
    "attn_norm": _NORM,
    "ffn_norm": _NORM,
    "attn.wq_a": ("q_lora", "embed"),
    "attn.q_norm": ("q_lora",),
    "attn.wq_b": ("heads", "q_lora"),
    "attn.wkv": ("head_dim", "embed"),
    "attn.kv_norm": ("head_dim",),
    "attn.attn_sink": ("heads",),
    "attn.wo_a": ("o_groups", None),
    "attn.wo_b": ("embed", "o_groups"),
    "attn.compressor.wkv": ("head_dim", "embed"),
    "attn.compressor.wgate": ("head_dim", "embed"),
    "attn.compressor.norm": ("head_dim",),
    "attn.indexer.wq_b": ("index_heads", "q_lora"),
    "attn.indexer.weights_proj": ("index_heads", "embed"),
    "attn.indexer.wk": (None, "head_dim"),
    "attn.indexer.k_norm": (None,),
    **{f"hc_{sublayer}_fn": (None, "embed") for sublayer in ("attn", "ffn")},
    **{f"hc_{sublayer}_{leaf}": (None,) for sublayer in ("attn", "ffn") for leaf in ("base", "scale")},
    "ffn.gate": (None, "embed"),
    "ffn.gate.bias": (None,),
    "ffn.gate.bias_vl": (None,),
    **{f"ffn.shared_experts.{name}": axes for name, axes in _SHARED.items()},
    **{f"ffn.experts.{name}": ("experts", *axes) for name, axes in _ROUTED.items()},
    "engram.embed": ("engram_rows", None),
    "engram.wkv": ("embed", None),
    "engram.q_weight": (None, "embed"),
    "engram.k_weight": (None, "embed"),
    "main_proj": ("embed", None),
    "main_norm": _NORM,
    "markov_head.embed": ("vocab", None),
    "markov_head.head": ("vocab", None),
    "confidence_head.proj": (None, "embed"),
}
"""Logical axes of each module's parameters, as the modules declare them (a test holds the two equal)."""

_EXPERT = "ffn.experts.0."


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A tensor of the checkpoint, or one matrix of all routed experts of a layer.

    Attributes:
      name: public name; of stacked experts that of expert 0.
      layer: of the backbone; None outside its layers.
      module: the name without its layer, its expert and ``weight`` or ``scale``.
      drafter: whether it is DSpark's.
      shape: as held in memory, the experts' axis first.
      itemsize: bytes of an element.
      axes: logical axes of the shape.
      multiplies: whether tokens are multiplied by it; False for tables, vectors and scales.
      width: values that an element of the last axis holds: 2 for packed FP4.
    """

    name: str
    layer: int | None
    module: str
    drafter: bool
    shape: tuple[int, ...]
    itemsize: int
    axes: tuple[str | None, ...]
    multiplies: bool
    width: int

    @property
    def routed(self) -> bool:
        return self.module.startswith("ffn.experts.")


@dataclasses.dataclass(frozen=True)
class Held:
    """A parameter's part on one device: bytes, and values that a token is multiplied by."""

    parameter: Parameter
    nbytes: int
    matrix: int


@functools.lru_cache(maxsize=8)
def parameters(settings: Settings) -> tuple[Parameter, ...]:
    """All parameters of the text model and the drafter, stored as the settings say."""
    config, text = settings.config, settings.text
    # The layout lists experts one by one; of one expert it is short, and all are alike.
    few = dataclasses.replace(text, n_routed_experts=1, dspark_n_routed_experts=1)
    quantization = config.quantization if settings.packed_weights else None
    layout = checkpoint_layout(dataclasses.replace(config, text=few, quantization=quantization))
    found = (_parameter(settings, spec) for spec in layout.values() if spec.part != "vision")
    return tuple(p for p in found if settings.engram_in_step or p.module != "engram.embed")


def _parameter(settings: Settings, spec: TensorSpec) -> Parameter:
    text, drafter = settings.text, spec.part == "dspark"
    words = spec.name.split(".")
    layer = int(words[1]) if words[0] == "layers" else None
    module = ".".join(words[2:] if words[0] in ("layers", "mtp") else words)
    is_expert = module.startswith(_EXPERT)
    module = module.replace(_EXPERT, "ffn.experts.").removesuffix(".weight")
    # "ffn.gate.scale" does not exist, "hc_attn_scale" is no block scale.
    is_scale = spec.dtype == "F8_E8M0"
    module = module.removesuffix(".scale")
    experts = text.dspark_n_routed_experts if drafter else text.n_routed_experts
    shape = spec.shape
    if is_expert:
        shape = (experts, *shape)
    elif module.startswith("ffn.gate"):
        shape = (experts, *shape[1:])
    itemsize = settings.dtype.itemsize if spec.dtype == "BF16" else STORAGE_BYTES[spec.dtype]
    multiplies = len(spec.shape) == 2 and not is_scale and not module.endswith("embed")
    width = 2 if spec.dtype == "I8" else 1
    return Parameter(spec.name, layer, module, drafter, shape, itemsize, _AXES[module], multiplies, width)


def held_parameters(settings: Settings, preset: MeshPreset) -> tuple[Held, ...]:
    """What one device of the mesh holds of every parameter.

    Raises:
      MeshError: a parameter does not fit the mesh; names the parameter and both axes.
    """

    def held(parameter: Parameter) -> Held:
        spec = partition(parameter.name, parameter.axes, parameter.shape, preset.axes, preset.rules)
        count = math.prod(part_shape(parameter.shape, spec, preset.axes))
        return Held(parameter, count * parameter.itemsize, count * parameter.width * parameter.multiplies)

    return tuple(held(parameter) for parameter in parameters(settings))
