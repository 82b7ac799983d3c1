"""Counting the launches of a compiled program."""

from __future__ import annotations

import pytest

from dsv41.evaluation.launches import Launches, Loop, launches

PROGRAM = """HloModule jit_step, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %a = f32[4]{0} negate(%p)
  ROOT %b = f32[4]{0} exponential(%a)
}

%inner_body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %v = f32[4]{0} get-tuple-element(%t), index=1
  %i = s32[] get-tuple-element(%t), index=0
  %one = f32[4]{0} fusion(%v), kind=kLoop, calls=%fused
  ROOT %r = (s32[], f32[4]{0}) tuple(%i, %one)
}

%condition (t: (s32[], f32[4])) -> pred[] {
  %t = (s32[], f32[4]{0}) parameter(0)
  ROOT %c = pred[] fusion(%t), kind=kLoop, calls=%fused
}

%layer (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %kernel = (f32[4]{0}, f32[4]{0}) custom-call(%t), custom_call_target="__gpu$xla.gpu.triton"
  %copied = f32[4]{0} copy(%kernel)
  ROOT %w = (s32[], f32[4]{0}) while(%t), condition=%condition, body=%inner_body, \
backend_config={"known_trip_count":{"n":"3"}}
}

%rare (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %x = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused
  ROOT %y = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
}

%often (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}

%commands (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %y = f32[4]{0} custom-call(%p), custom_call_target="__cublas$gemm"
}

ENTRY %main (x: f32[4], which: s32[]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %which = s32[] parameter(1)
  %start = f32[4]{0} constant({1, 2, 3, 4})
  %called = f32[4]{0} call(%x), to_apply=%commands
  %loop = (s32[], f32[4]{0}) while(%called), condition=%condition, body=%layer, \
backend_config={"known_trip_count":{"n":"5"}}
  %unknown = (s32[], f32[4]{0}) while(%loop), condition=%condition, body=%inner_body
  ROOT %end = f32[4]{0} conditional(%which, %x, %x), branch_computations={%rare, %often}
}
"""


def test_loops_calls_and_branches_are_followed():
    # The call 1, five turns of a layer of 2 + 3, one turn of the unknown loop, and the longer branch.
    assert launches(PROGRAM) == Launches(1 + 5 * 5 + 1 + 2, (Loop(5, 5), Loop(0, 1)))


def test_a_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="no entry"):
        launches(PROGRAM.replace("ENTRY", "ENTRANCE"))
