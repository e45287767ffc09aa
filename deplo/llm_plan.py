"""The programs of a prepared language model, and the calls of the model that go to them."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from transformers.modeling_outputs import Seq2SeqLMOutput

from . import llm_capture, llm_experts, llm_layers, llm_positions
from .decorator import jit
from .dispatch import call_report
from .errors import Error, FallbackWarning, UnsupportedError, UserError
from .executable import restore_weights
from .llm_cache import LayerShape, PreparedCache, Store, View, shapes_of
from .progress import Bar

# What generate() passes on that changes nothing while it is not asked for.
_IDLE = {"output_attentions", "output_hidden_states", "output_router_logits", "labels", "inputs_embeds", "token_type_ids"}


class Step(torch.nn.Module):
    """One call of the model: tokens at given positions of a store, and logits of the last `keep` of them (0: of all)."""

    def __init__(self, model: torch.nn.Module, cache_name: str, accepted: frozenset[str], sliding: tuple[bool, ...], is_asked: bool = True) -> None:
        super().__init__()
        # Whether the model is asked to keep a cache. It is given one in any case; asked, PhiMoE looks whether a text grows beyond its tables.
        self.is_asked = is_asked
        self.model = model
        self.cache_name = cache_name
        self.accepted = accepted
        self.sliding = sliding
        self.call = type(model).forward

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        position_ids: torch.Tensor,
        seen: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        keep: int,
    ) -> torch.Tensor:
        cache = View(keys, values, positions, self.sliding)
        given = {"position_ids": position_ids, "cache_position": positions, "logits_to_keep": keep, "return_dict": True}
        more = {name: value for name, value in given.items() if name in self.accepted}
        logits: torch.Tensor = self.call(
            self.model, input_ids=ids, attention_mask=seen, use_cache=self.is_asked, **{self.cache_name: cache}, **more
        ).logits
        if keep and "logits_to_keep" not in self.accepted:
            logits = logits[:, -keep:]
        return logits


_numbers = itertools.count()


def of_its_own(kind: type[torch.nn.Module], *arguments: Any) -> Any:
    """A module with a forward that no other has: Dynamo counts compilations by code, and gives up after a few, whatever models they are of."""
    shared: Any = kind.forward
    forward = types.FunctionType(shared.__code__.replace(co_name=f"forward_{next(_numbers)}"), shared.__globals__)
    return type(kind.__name__, (kind,), {"forward": forward})(*arguments)


class Plans:
    """What `deplo.prepare` puts into a model: prefill, decode, and what serves other calls."""

    ids_name, mask_name, positions_name = "input_ids", "attention_mask", "position_ids"
    # What the programs take of a call, beside the cache.
    own: frozenset[str] = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "return_dict", "logits_to_keep"})
    cache_class: Any = PreparedCache
    has_limit = True  # of tokens
    has_regions = True  # equal layers are traced once
    _of_state: Any = None  # of the hook that it has where weights leave memory
    prefill: Any
    decode: Any
    layers: list[LayerShape]
    sliding: tuple[bool, ...]

    def __init__(self, model: Any, length: int, batches: Sequence[int], options: Mapping[str, Any]) -> None:
        self.model, self.length, self.batches, self.options = model, length, tuple(sorted(batches)), dict(options)
        names = inspect.signature(type(model).forward).parameters
        self.accepted = frozenset(names)
        self.cache_name = next((name for name in ("cache", "cache_params") if name in names), "past_key_values")
        self._pools: dict[int, list[Store]] = {batch: [] for batch in self.batches}
        self._told: set[str] = set()
        self._output = output_class(model)
        llm_capture.install()
        llm_experts.install(model)
        self.is_asked = not llm_positions.install(model, length)
        self.has_tables = llm_positions.has_tables(model)
        self.make()

    def make(self) -> None:
        """The programs, and what the model keeps of a token."""
        with llm_layers.watched(self.model) as seen:
            self.layers = shapes_of(self.model, self.cache_name)
        self.sliding = tuple(layer.sliding for layer in self.layers)
        if self.has_regions:
            llm_layers.install(seen, len(self.layers))
        self.make_programs()

    def make_programs(self) -> None:
        """Both, not compiled."""
        arguments = (self.model, self.cache_name, self.accepted, self.sliding, self.is_asked)
        self.prefill = jit(of_its_own(Step, *arguments), options=self.options, fullgraph=True, guards="inputs")
        self.decode = jit(of_its_own(Step, *arguments), options=self.options, fullgraph=True, dynamic=False, guards="inputs")

    def __reduce__(self) -> Any:  # a copy of the model compiles programs of its own, when it is called
        return _unmade, (type(self), self.model, self.length, self.batches, self.options)

    def __getattr__(self, name: str) -> Any:
        """Makes what a copy was made without: its model had no parts yet."""
        if "prefill" in self.__dict__ or "options" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        type(self).__init__(self, self.model, self.length, self.batches, self.options)
        return getattr(self, name)

    def install(self) -> None:
        """Lets the model's calls, generate() among them, go to the programs."""
        self.model.deplo_plans = self
        self.model.forward = _method(self, "call")
        self.model._prepare_cache_for_generation = _method(self, "cache_of_generate")
        if self.options.get("weights") == "own":
            self._of_state = self.model.register_state_dict_pre_hook(_restore)

    def remove(self) -> None:
        """Leaves the model as it was built."""
        for name in ("deplo_plans", "forward", "_prepare_cache_for_generation"):
            self.model.__dict__.pop(name, None)
        if self._of_state is not None:
            self._of_state.remove()
        llm_experts.remove(self.model)
        llm_layers.remove(self.model)
        llm_positions.remove(self.model)

    def warm_up_steps(self, lengths: list[int]) -> int:
        """How often `warm_up` tells a bar."""
        return len(self.batches) * (len(lengths) + 1)

    def warm_up(self, lengths: list[int], bar: Bar) -> None:
        """Compiles and runs the programs: prompts of these lengths, and a token after each."""
        try:
            self._warm_up(lengths, bar)
        except (TorchDynamoException, RuntimeError) as error:
            if _is_ours(error) or not llm_layers.remove(self.model):
                raise
            self.has_regions = False  # what Dynamo cannot say of a layer, it can of all of them
            self.make_programs()
            self._warm_up(lengths, bar)

    def _warm_up(self, lengths: list[int], bar: Bar) -> None:
        for batch in self.batches:
            cache = self.cache(batch)
            with torch.no_grad():
                for length in lengths:
                    bar.step(f"prompts, {batch} at once")
                    cache.reset()
                    self.call(input_ids=torch.zeros(batch, length, dtype=torch.int64), logits_to_keep=1, **{self.cache_name: cache})
                bar.step(f"single tokens, {batch} at once")
                for _ in range(2):  # the second goes by its arguments alone
                    cache.length = 0
                    self.call(input_ids=torch.zeros(batch, 1, dtype=torch.int64), **{self.cache_name: cache})

    def fitting(self, batch: int) -> int:
        """The smallest size that holds so many sequences."""
        fitting = [size for size in self.batches if size >= batch]
        if not fitting:
            raise UserError(
                f"{batch} sequences at once, but the model is prepared for at most {self.batches[-1]}: deplo.prepare(model, batch={batch}, ...)"
                " (beams and returned sequences count)"
            )
        return fitting[0]

    def cache(self, batch: int = 1) -> Any:
        """A cache for `batch` sequences, empty."""
        size = self.fitting(batch)
        if not llm_experts.are_in_place(self.model):
            llm_experts.restack(self.model)
        pool = self._pools[size]
        return self.new_prepared(pool.pop() if pool else self.new_store(size), pool)

    def new_store(self, batch: int) -> Any:
        """Memory for `batch` sequences."""
        return Store(self.layers, batch, self.length)

    def new_prepared(self, store: Any, pool: list[Any]) -> Any:
        """A cache over a store."""
        return self.cache_class(store, self, pool, self.sliding)

    def cache_memory(self) -> int:
        """Bytes of a store of each size."""
        return sum(batch * self.length * layer.bytes_of_token() for layer in self.layers for batch in self.batches)

    def cache_of_generate(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, max_cache_length: int, *more: Any
    ) -> Any:
        """generate()'s own method: gives it a prepared cache, where it is not asked for another one."""
        kind = generation_config.cache_implementation
        if model_kwargs.get(self.cache_name) is not None or generation_config.use_cache is False or kind not in (None, "static", "hybrid"):
            return type(self.model)._prepare_cache_for_generation(
                self.model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *more
            )
        if self.has_limit and max_cache_length + 1 > self.length:
            raise UserError(
                f"the prompt and the new tokens may come to {max_cache_length + 1} tokens, but the model is prepared for {self.length}: lower "
                f"max_new_tokens (or max_length), or deplo.prepare(model, max_length={max_cache_length + 1}, ...)"
            )
        sequences = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        model_kwargs[self.cache_name] = self.cache(sequences)
        return None

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments of the model's forward by name."""
        if not args:
            return kwargs
        names = list(inspect.signature(type(self.model).forward).parameters)[1:]
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        kwargs = self.named(args, kwargs)
        cache = kwargs.get(self.cache_name)
        if not isinstance(cache, PreparedCache):
            return type(self.model).forward(self.model, **kwargs)
        if cache.owner is not self:
            raise UserError("this cache belongs to another prepared model")
        ids = kwargs.get(self.ids_name)
        embeds = self.ids_name.replace("input_ids", "inputs_embeds")
        if ids is None:
            ids = kwargs.get(embeds)
        if ids is None:
            raise UserError(f"a call of the model needs {self.ids_name} (or {embeds})")
        rows, tokens = ids.shape[:2]
        start = cache.length
        positions = kwargs.get("cache_position")
        if positions is None:
            positions = torch.arange(start, start + tokens)
        if start + tokens > self.length:
            raise UserError(f"{start} tokens are in the cache and {tokens} come to them, but the model is prepared for {self.length}")
        if rows > cache.store.batch:
            raise UserError(f"{rows} sequences, but the cache is one for {cache.store.batch}")
        mask = kwargs.get(self.mask_name)
        why = ""
        if mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] <= self.length):
            cache.store.set_mask(mask)
            logits = None if (why := self._why_not(kwargs, ids)) else self._run(cache, ids, positions, kwargs, rows, tokens)
        else:
            logits, why = None, f"its {self.mask_name} is no matrix with a column a token"
        if logits is None:
            result = self._as_it_was(cache, kwargs, positions, rows, why)
        else:
            result = self._output(logits=logits, **{self.cache_name: cache})
            if kwargs.get("return_dict") is False:
                result = result.to_tuple()
        cache.length = start + tokens
        return result

    def _why_not(self, kwargs: dict[str, Any], ids: torch.Tensor) -> str:
        """Why a call is no call of the programs; empty if it is one."""
        if torch.is_grad_enabled() and (self.model.training or any(p.requires_grad for p in self.model.parameters())):
            return "gradients are wanted: call it under torch.no_grad()"
        if self.model.training:
            return "the model is in training mode"
        if ids.is_floating_point():
            return "it is given inputs_embeds"
        for name, value in kwargs.items():
            if name in self.own or name == self.cache_name or value is None or (name in _IDLE and value is False):
                continue
            return f"it is given {name}"
        if not isinstance(kwargs.get("logits_to_keep", 0), int):
            return "logits_to_keep is no number"
        return self._why_not_places(kwargs.get(self.positions_name))

    def _why_not_places(self, places: torch.Tensor | None) -> str:
        """Tables of positions are as long as the cache."""
        if not self.has_tables or places is None or not places.numel():
            return ""
        least, most = (int(x) for x in places.aminmax())
        return (
            f"its {self.positions_name} reach from {least} to {most}, beyond the {self.length} prepared ones"
            if least < 0 or most >= self.length
            else ""
        )

    def padded(
        self, store: Store, ids: torch.Tensor, positions: torch.Tensor, kwargs: dict[str, Any], rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their positions for all rows of the store."""
        places = kwargs.get(self.positions_name)
        if places is None:
            places = positions.repeat(rows, 1)
        if places.shape[0] != rows:
            places = places.expand(rows, -1)
        if rows < store.batch:  # what the other rows compute, nobody reads
            ids = torch.nn.functional.pad(ids, (0, 0, 0, store.batch - rows))
            places = torch.nn.functional.pad(places, (0, 0, 0, store.batch - rows))
        return plain(ids), plain(places)

    def _run(self, cache: Any, ids: torch.Tensor, positions: torch.Tensor, kwargs: dict[str, Any], rows: int, tokens: int) -> torch.Tensor | None:
        store = cache.store
        ids, places = self.padded(store, ids, positions, kwargs, rows)
        keep = kwargs.get("logits_to_keep") or 0
        if tokens == 1:
            logits = self.decode(ids, positions, places, store.seen, store.keys, store.values, 0)
        else:
            for tensor, axis in ((ids, 1), (places, 1), (positions, 0)):
                torch._dynamo.maybe_mark_dynamic(tensor, axis)
            logits = self.prefill(ids, positions, places, store.seen, store.keys, store.values, min(keep, tokens))
        result: torch.Tensor = logits if rows == store.batch else logits[:rows]
        return result

    def tell(self, why: str) -> None:
        """Warns once that a call runs in eager mode."""
        if why not in self._told:
            self._told.add(why)
            warnings.warn(f"a call of the prepared model runs in eager mode: {why}", FallbackWarning, stacklevel=5)

    def _as_it_was(self, cache: Any, kwargs: dict[str, Any], positions: torch.Tensor, rows: int, why: str) -> Any:
        self.tell(why)
        if rows != cache.store.batch:
            raise UserError(f"{why}, and a cache for {cache.store.batch} sequences takes {rows} only in the prepared programs")
        given = {**kwargs, self.cache_name: cache.view(positions)}
        if given.get(self.mask_name) is None:
            given[self.mask_name] = cache.store.seen
        if given.get(self.positions_name) is None and self.positions_name in self.accepted:
            given[self.positions_name] = positions[None].expand(rows, -1)
        if "cache_position" in self.accepted:
            given["cache_position"] = positions
        result = type(self.model).forward(self.model, **given)
        if isinstance(result, dict):
            result[self.cache_name] = cache
        return result

    def report(self) -> str:
        """How calls of both programs went."""
        return f"prefill: {call_report(self.prefill)}\ndecode: {call_report(self.decode)}"


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with strides that follow from its sizes: `prompt[:, :1]` counts as contiguous with any stride along its one column, and Dynamo would
    compile another program for each, as for each layout of what a view is taken of."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _is_ours(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, is deplo's own, but for what deplo does not support."""
    while error is not None:
        if isinstance(error, Error) and not isinstance(error, UnsupportedError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _restore(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    """Whoever asks for a model's state may hand it to the system (safetensors, numpy), for which weights that are gone must be there first."""
    restore_weights()


class _Method:
    """A method of the plans in the place of one of the model's; copies go with the model."""

    def __init__(self, plans: Plans, name: str) -> None:
        self.plans, self.name = plans, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.plans, self.name)(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _method, (self.plans, self.name)


def _unmade(kind: type[Plans], model: Any, length: int, batches: Sequence[int], options: Mapping[str, Any]) -> Plans:
    plans = kind.__new__(kind)
    plans.model, plans.length, plans.batches, plans.options = model, length, tuple(batches), dict(options)
    return plans


def _method(plans: Plans, name: str) -> Any:
    method = _Method(plans, name)
    return functools.update_wrapper(method, type(plans.model).forward) if name == "call" else method


def output_class(model: Any) -> Any:
    """The class of what the model's forward returns."""
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            return Seq2SeqLMOutput
        return type(type(model).forward(model, input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False, return_dict=True))
