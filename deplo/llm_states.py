"""Prepared models that keep a state of one size instead of keys and values: Mamba and its like.

Prompts are a program for any length (`llm_mixers`), single tokens another one; the states of both stay where they are.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch

from . import llm_mixers, llm_state_caches
from .decorator import jit
from .errors import UnsupportedError, UserError
from .llm_plan import Plans, of_its_own
from .progress import Bar


class StateStep(torch.nn.Module):
    """A token after those that the states hold, or a prompt of more than one, which begins with none; and logits of the last `keep` (0: of all)."""

    def __init__(self, model: Any, caches: Any) -> None:
        super().__init__()
        self.model = model
        self.call = type(model).forward
        self.caches = caches
        self.keeps = "logits_to_keep" in inspect.signature(self.call).parameters

    def forward(self, ids: torch.Tensor, position: torch.Tensor, mask: torch.Tensor | None, states: list[torch.Tensor], keep: int) -> torch.Tensor:
        cache = self.caches.view(states, ids.shape[1] > 1)
        more = {**self.caches.arguments(position), **({"logits_to_keep": keep} if self.keeps else {})}
        logits: torch.Tensor = self.call(
            self.model, input_ids=ids, cache_params=cache, attention_mask=mask, use_cache=True, return_dict=True, **more
        ).logits
        return logits


class StateStore:
    """States of `batch` sequences."""

    def __init__(self, caches: Any, batch: int) -> None:
        self.batch, self.caches = batch, caches
        self.states = caches.tensors(caches.make(batch))

    def clear(self) -> None:
        """As before a text."""
        for state in self.states:
            state.zero_()


class PreparedStates:
    """A store with the number of tokens behind it. It goes back to its pool when nobody has it any more."""

    is_compileable = False

    def __init__(self, store: StateStore, owner: Any, pool: list[StateStore]) -> None:
        self.store, self.owner, self.length = store, owner, 0
        weakref.finalize(self, pool.append, store)

    @property
    def max_batch_size(self) -> int:
        return self.store.batch

    def get_seq_length(self, *args: Any) -> int:
        return self.length

    def reset(self) -> None:
        self.length = 0

    def keep(self, cache: Any, rows: int) -> None:
        """Takes over the states of a cache of the model's for so many sequences."""
        caches = self.store.caches
        for mine, given in zip(self.store.states, caches.tensors(cache), strict=True):
            mine.narrow(caches.axis, 0, rows).copy_(given)

    def given(self, rows: int) -> Any:
        """A cache of the model's with copies of the states of so many sequences."""
        caches = self.store.caches
        if not self.length:
            return caches.make(rows)
        return caches.view([mine.narrow(caches.axis, 0, rows).clone() for mine in self.store.states], False)


class StatePlans(Plans):
    """What `deplo.prepare` puts into a model with states."""

    own = frozenset({"input_ids", "attention_mask", "cache_position", "use_cache", "return_dict"})
    cache_class = PreparedStates
    has_limit = False

    def make(self) -> None:
        self.caches = llm_state_caches.kind_of(self.model)
        self.layers, self.sliding = [], ()
        self.keeps = "logits_to_keep" in self.accepted
        if self.keeps:
            self.own = self.own | {"logits_to_keep"}
        taps = self.model.config.conv_kernel
        llm_mixers.install(self.model, self.caches.make, {"cache_position": torch.arange(taps)})
        self.ignores_mask_of_one = llm_mixers.ignores_mask_of_one(self.model)
        self.position = torch.full((1,), taps)  # of a token behind those that a convolution reads
        arguments = (self.model, self.caches)
        self.prefill = jit(of_its_own(StateStep, *arguments), options=self.options, fullgraph=True, guards="inputs")
        self.decode = jit(of_its_own(StateStep, *arguments), options=self.options, fullgraph=True, dynamic=False, guards="inputs")

    def cache_memory(self) -> int:
        return sum(batch * x.nbytes for x in self.caches.tensors(self.caches.make(1)) for batch in self.batches)

    def new_store(self, batch: int) -> Any:
        return StateStore(self.caches, batch)

    def new_prepared(self, store: Any, pool: Any) -> Any:
        return PreparedStates(store, self, pool)

    def remove(self) -> None:
        super().remove()
        llm_mixers.remove(self.model)

    def warm_up_steps(self, lengths: list[int]) -> int:
        return super().warm_up_steps(self._lengths(lengths))

    def _lengths(self, lengths: list[int]) -> list[int]:
        """Those of prompts that are compiled: Dynamo makes one program of a single chunk of tokens, another one of all others."""
        chunk = getattr(self.model.config, "chunk_size", 0)
        return [max(2, min(chunk, 128)), 2 * chunk + 1] if chunk else lengths

    def _warm_up(self, lengths: list[int], bar: Bar) -> None:
        lengths = self._lengths(lengths)
        more = {"logits_to_keep": 1} if self.keeps else {}
        for batch in self.batches:
            cache = self.cache(batch)
            with torch.no_grad():
                for length in lengths:
                    bar.step(f"prompts, {batch} at once")
                    cache.reset()
                    self.call(input_ids=torch.zeros(batch, length, dtype=torch.int64), **more, **{self.cache_name: cache})
                bar.step(f"single tokens, {batch} at once")
                for _ in range(2):  # the second goes by its arguments alone
                    self.call(input_ids=torch.zeros(batch, 1, dtype=torch.int64), **{self.cache_name: cache})

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        kwargs = self.named(args, kwargs)
        cache = kwargs.get(self.cache_name)
        if not isinstance(cache, PreparedStates):
            return type(self.model).forward(self.model, **kwargs)
        if cache.owner is not self:
            raise UserError("this cache belongs to another prepared model")
        ids = kwargs.get("input_ids")
        if ids is None:
            ids = kwargs.get("inputs_embeds")
        if ids is None:
            raise UserError("a call of the model needs input_ids (or inputs_embeds)")
        rows, tokens = ids.shape[:2]
        if rows > cache.store.batch:
            raise UserError(f"{rows} sequences, but the cache is one for {cache.store.batch}")
        if cache.length and tokens > 1:
            raise UserError(f"{tokens} tokens at once after others: {type(self.model).__name__} takes them one by one")
        mask = kwargs.get("attention_mask")
        if mask is not None and ((rows == 1 and self.ignores_mask_of_one) or bool(mask.all())):
            mask = None
        why = self._why_not(kwargs, ids) or self._why_not_mask(mask, ids)
        if why:
            result = self._by_itself(cache, kwargs, rows, why)
        else:
            logits = self._run_states(cache, ids, mask, rows, tokens, kwargs.get("logits_to_keep") or 0)
            result = self._output(logits=logits, **{self.cache_name: cache})
            if kwargs.get("return_dict") is False:
                result = result.to_tuple()
        cache.length += tokens
        return result

    def _why_not_mask(self, mask: Any, ids: torch.Tensor) -> str:
        if mask is None or (ids.shape[1] > 1 and mask.shape == ids.shape):
            return ""
        return "its attention_mask leaves out a token after which there is none, or is no matrix of its tokens"

    def _run_states(self, cache: PreparedStates, ids: torch.Tensor, mask: torch.Tensor | None, rows: int, tokens: int, keep: int) -> torch.Tensor:
        store = cache.store
        # What the other rows compute, nobody reads. A copy has strides of its own: a column of a text of one row counts as contiguous.
        more = (0, 0, 0, store.batch - rows)
        ids = torch.nn.functional.pad(ids, more).clone(memory_format=torch.contiguous_format)
        if tokens == 1:
            if not cache.length:
                store.clear()
            logits = self.decode(ids, self.position, None, store.states, 0)
        else:
            seen = torch.ones_like(ids) if mask is None else torch.nn.functional.pad(mask.to(ids.dtype), more, value=1).contiguous()
            for tensor in (ids, seen):
                torch._dynamo.maybe_mark_dynamic(tensor, 1)
            logits = self.prefill(ids, self.position, seen, store.states, min(keep, tokens))
        result: torch.Tensor = logits[:rows]
        return result

    def _by_itself(self, cache: Any, kwargs: dict[str, Any], rows: int, why: str) -> Any:
        """The model as it was."""
        self.tell(why)
        own = cache.given(rows)
        given = {**kwargs, self.cache_name: own, "use_cache": True}
        if "cache_position" in self.accepted:  # for a prompt of any length as the model wants it
            given["cache_position"] = self.position if cache.length else torch.arange(self.model.config.conv_kernel)
        result = type(self.model).forward(self.model, **given)
        cache.keep(own, rows)
        if isinstance(result, dict):
            result[self.cache_name] = cache
        return result

    def report(self) -> str:
        """How calls of the program went."""
        from .dispatch import call_report

        return f"prefill: {call_report(self.prefill)}\ndecode: {call_report(self.decode)}"


def check(model: Any) -> None:
    """Raises UnsupportedError for caches that are not of states alone."""
    if llm_state_caches.kind_of(model) is None:
        raise UnsupportedError(
            f"{type(model).__name__} keeps a state that prepare does not know: use model.forward = torch.compile(model.forward, backend='deplo')"
        )
