"""Gradients of operators that run nets, under the name that scripts import; see `core.control_gradients`."""

from __future__ import annotations

from poseidon.caffe2.core.control_gradients import gen_do_gradient, gen_if_gradient, gen_while_gradient

__all__ = ["gen_do_gradient", "gen_if_gradient", "gen_while_gradient"]
