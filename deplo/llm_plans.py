"""Which plans serve a model. Apart from them, so that they need not know each other."""

from __future__ import annotations

import inspect
from typing import Any

from .llm_plan import Plans


def plans_for(model: Any) -> type[Plans]:
    """By how the model keeps what it has read."""
    if model.config.is_encoder_decoder:
        from .llm_encoder import EncoderPlans

        return EncoderPlans
    if "cache_params" in inspect.signature(type(model).forward).parameters:
        from .llm_states import StatePlans, check

        check(model)
        return StatePlans
    return Plans
