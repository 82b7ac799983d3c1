"""What runs beside collectives, read from the text of a scheduled program."""

from __future__ import annotations

import pytest

from dsv41.planning.schedule import Scheduled, scheduled_collectives

_PATH = "jit(part)/shard_map/Model.encode/Model.begin/encoder/groups_0/runs_0"


def _named(path: str) -> str:
    return f'metadata={{op_name="{path}" stack_frame_id=1}}'


def _kernel(name: str, module: str) -> str:
    return f'%{name} = bf16[16,64]{{1,0}} custom-call(%p), custom_call_target="tpu_custom_call", {_named(module)}'


TEXT = f"""HloModule jit_part, is_scheduled=true, entry_computation_layout={{}}

%region_0.1 (a: f32[], b: f32[]) -> f32[] {{
  ROOT %add.1 = f32[] add(%a, %b), {_named("Model.encode/encoder/groups_0/runs_0/ffn/experts/add")}
}}

%fused_computation.1 (p: f32[256,64]) -> (f32[256,64], u32[]) {{
  %all-reduce.1 = f32[256,64]{{1,0}} all-reduce(%p), channel_id=3, replica_groups={{{{0,1}}}}, to_apply=%region_0.1
  ROOT %custom-call.1 = (f32[256,64], u32[]) custom-call(%all-reduce.1), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.2 (p: f32[256,64]) -> (bf16[16,64], f32[256,64]) {{
  %all-reduce.2 = f32[256,64]{{1,0}} all-reduce(%p), channel_id=3, replica_groups={{{{0,1}}}}, to_apply=%region_0.1
  {_kernel("block_linear.1", _PATH + "/ffn/shared_experts/w1/block_linear/pallas_call")}
}}

%fused_computation.3 (p: f32[256,64]) -> f32[256,64] {{
  %all-reduce.3 = f32[256,64]{{1,0}} all-reduce(%p), channel_id=3, replica_groups={{{{0,1}}}}, to_apply=%region_0.1
  ROOT %custom-call.3 = f32[256,64] custom-call(%p, %all-reduce.3), custom_call_target="AsyncCollectiveDone"
}}

%body.4 (p: (s32[], f32[256,64])) -> (s32[], f32[256,64]) {{
  {_kernel("attention.1", _PATH + "/attn/sparse_attention/pallas_call")}
  %ragged-all-to-all-start.1 = ((f32[8,64]), f32[8,64]) ragged-all-to-all-start(%p), channel_id=1, {
    _named(_PATH + "/ffn/experts/cond/branch_0_fun/ragged_all_to_all")
}
  {_kernel("block_linear.2", _PATH + "/ffn/shared_experts/w3/block_linear/pallas_call")}
  %ragged-all-to-all-start.2 = ((f32[8,64]), f32[8,64]) ragged-all-to-all-start(%q), channel_id=1, {
    _named(_PATH + "/ffn/experts/cond/branch_0_fun/ragged_all_to_all")
}
  %ragged-all-to-all-done.1 = f32[8,64] ragged-all-to-all-done(%ragged-all-to-all-start.1), {_named("x/y")}
  %ragged-all-to-all-done.2 = f32[8,64] ragged-all-to-all-done(%ragged-all-to-all-start.2), {_named("x/y")}
  {_kernel("attention.2", _PATH + "/attn/sparse_attention/pallas_call")}
}}

ENTRY %main.5 (p: f32[256,64]) -> f32[256,64] {{
  %all-gather.1 = f32[2,256,64] all-gather(%p), channel_id=9, {_named("jit(part)/shard_map/Model.logits/all_gather")}
  %while.1 = (s32[], f32[256,64]) while(%p), condition=%cond.6, body=%body.4
  %async-collective-start = (f32[256,64], u32[]) fusion(%p), kind=kCustom, calls=%fused_computation.1
  %block_linear.3 = (bf16[16,64], f32[256,64]) fusion(%g), kind=kCustom, calls=%async_collective_fusion.2
  ROOT %async-collective-done = f32[256,64] fusion(%h), kind=kCustom, calls=%fused_computation.3
}}
"""


def test_work_between_beginning_and_end_is_found():
    assert sorted(scheduled_collectives(TEXT), key=str) == [
        Scheduled("all-gather", "", None, 1),
        Scheduled("all-reduce", "ffn/experts", ("ffn/shared_experts",), 1),
        Scheduled("ragged-all-to-all", "ffn/experts", ("ffn/shared_experts",), 1),
        Scheduled("ragged-all-to-all", "ffn/experts", (), 1),
    ]


def test_a_program_without_a_schedule_is_refused():
    with pytest.raises(ValueError, match="not that of a scheduled one"):
        scheduled_collectives(TEXT.replace("is_scheduled=true, ", ""))
