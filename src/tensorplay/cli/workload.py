"""What is trained: a model, its batches, loss and optimizer, by name. Used by `tensorplay compare` and `advise`.

A name is one of three things:

1. "mlp": six square layers of 2048, 25 million parameters, batches of 96; "mlp:width=64,layers=2,batch=8" changes it.
2. "gpt:SIZE": the byte-level GPT on the source code of Python's standard library; sizes are in `tensorplay.cli.gpt`.
3. The user's own, as "module:function"; the current folder counts as a place to look. The function is called on every
   rank, once for each model that is needed, with those of `rank`, `world_size` and `seed` that it has as parameters,
   and returns

       (model, batches)  or  (model, batches, loss)  or  (model, batches, loss, optimizer)

   - model: an nn.Module on the CPU, not wrapped in DDP. torch's generator is seeded with `seed` before the call, alike
     on all ranks.
   - batches: an iterable of this rank's batches; it is gone through again when it ends. One that can only be gone
     through once, as a generator, must not end.
   - loss(model, batch): a scalar tensor to call backward on. It must call the model that it is given, which is the
     wrapped one. Without it, or with None: model(*batch) for a tuple or list, model(**batch) for a dict, else
     model(batch); an output that is no scalar becomes the mean of its squares.
   - optimizer(model): returns the torch.optim.Optimizer to step; it is given the bare model. Without it: SGD with a
     learning rate of 1e-3.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tensorplay.cli.command import UsageError
from tensorplay.cli.corpus import load_corpus
from tensorplay.cli.gpt import GPT, SIZES
from tensorplay.cli.training import build_optimizer, next_byte_loss

__all__ = ["Workload", "check_workload", "default_loss", "load_workload"]

_MLP = {"width": 2048, "layers": 6, "batch": 96}
_LEARNING_RATE = 1e-3
_FORMS = "mlp, mlp:width=N,layers=N,batch=N, gpt:SIZE, or your own as module:function"


@dataclass(frozen=True)
class Workload:
    """One rank's model and what trains it.

    Attributes:
        name: what it was loaded by.
        model: the bare module, on the CPU.
        batches: this rank's batches; see the module's docstring.
        loss: called with the model, wrapped or not, and a batch; returns a scalar.
        optimizer: called with the model; returns its optimizer.

    Example:
        >>> workload = load_workload("mlp:width=4,layers=1,batch=2", rank=0, world_size=1, seed=0)
        >>> workload.loss(workload.model, next(workload.endless())).dim()
        0
    """

    name: str
    model: nn.Module
    batches: Iterable[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]

    def endless(self) -> Iterator[Any]:
        """The batches, from the first again after the last.

        Raises:
            UsageError: there is none, or they can't be gone through a second time.
        """
        count = 0
        while True:
            before = count
            for batch in self.batches:
                count += 1
                yield batch
            if count == before:
                told = f"ended after {count} and can't be gone through again" if count else "are empty"
                raise UsageError(
                    f"the batches of {self.name} {told}; return a list, or a generator that never ends"
                )

    def parameter_count(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


def load_workload(spec: str, rank: int, world_size: int, seed: int) -> Workload:
    """Make a fresh model with its batches; equal weights on every rank, other batches on each.

    torch's global generator is left as found.

    Args:
        spec: see the module's docstring. rank, world_size: whose batches. seed: of weights and data.

    Raises:
        UsageError: an unknown name or size, a setting against its rule, a function that can't be imported or returned
            something else.

    Example:
        >>> load_workload("gpt:tiny", rank=0, world_size=2, seed=1).parameter_count() > 20_000
        True
    """
    make = check_workload(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(rank, world_size, seed)


def check_workload(spec: str) -> Callable[[int, int, int], Workload]:
    """What makes the workload called `spec`, as a function of rank, world_size and seed; no model is made here.

    Raises: UsageError: as load_workload, for all that shows before the user's function is called.
    Example:
        >>> check_workload("gpt:huge")
        Traceback (most recent call last):
        tensorplay.cli.command.UsageError: --model gpt:SIZE must have a size of tiny, small, base, large, got 'huge'
    """
    base, _, rest = spec.partition(":")
    if base == "mlp":
        sizes = _mlp_sizes(rest)
        return lambda rank, world_size, seed: _mlp(spec, sizes, rank, seed)
    if base == "gpt":
        if rest not in SIZES:
            raise UsageError(f"--model gpt:SIZE must have a size of {', '.join(SIZES)}, got {rest!r}")
        return lambda rank, world_size, seed: _gpt(spec, rest, rank, world_size, seed)
    function = _import(spec, base, rest)
    return lambda rank, world_size, seed: _own(spec, function, rank, world_size, seed)


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's output where it is a scalar, else the mean of its squares; the call: see the module's docstring.

    Raises: UsageError: the output is no tensor.
    Example:
        >>> default_loss(nn.Identity(), torch.tensor([1.0, 3.0]))
        tensor(5.)
    """
    if isinstance(batch, (tuple, list)):
        output = model(*batch)
    elif isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(batch)
    if not isinstance(output, Tensor):
        raise UsageError(
            f"without a loss the model must return a tensor, got {type(output).__name__}; "
            "return (model, batches, loss) with loss(model, batch)"
        )
    return output if output.dim() == 0 else output.square().mean()


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)


def _mlp_sizes(text: str) -> dict[str, int]:
    sizes = dict(_MLP)
    for part in text.split(",") if text else []:
        key, _, value = part.partition("=")
        if key not in sizes:
            raise UsageError(
                f"--model mlp has the settings {', '.join(sizes)}, written mlp:width=64; got {part!r}"
            )
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(f"{key} of --model mlp must be an integer >= 1, got {value!r}")
        sizes[key] = int(value)
    return sizes


def _mlp(spec: str, sizes: dict[str, int], rank: int, seed: int) -> Workload:
    layers: list[nn.Module] = []
    for _ in range(sizes["layers"]):
        layers += [nn.Linear(sizes["width"], sizes["width"]), nn.ReLU()]
    generator = torch.Generator().manual_seed((seed * 1_000_003 + rank) % 2**63)
    batch = torch.randn(sizes["batch"], sizes["width"], generator=generator)
    return Workload(spec, nn.Sequential(*layers), [batch], default_loss, _sgd)


def _gpt(spec: str, size_name: str, rank: int, world_size: int, seed: int) -> Workload:
    size, corpus = SIZES[size_name], load_corpus()

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        step = 0
        while True:
            yield corpus.training_batch(step, seed, rank, world_size, size.batch_size, size.context_bytes)
            step += 1

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return next_byte_loss(model, *batch)

    def optimizer(model: nn.Module) -> Optimizer:
        if not isinstance(model, GPT):
            raise TypeError(f"model must be the bare GPT, got {type(model).__name__}")
        return build_optimizer(model)

    return Workload(spec, GPT(size, seed), batches(), loss, optimizer)


def _import(spec: str, module: str, function: str) -> Callable[..., Any]:
    if not module or not function:
        raise UsageError(f"--model must be {_FORMS}; got {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--model must be {_FORMS}; got {spec!r} ({error})") from error
    if not callable(found):
        raise UsageError(f"--model {spec} must name a function, got {type(found).__name__}")
    return found


def _own(spec: str, function: Callable[..., Any], rank: int, world_size: int, seed: int) -> Workload:
    offered = {"rank": rank, "world_size": world_size, "seed": seed}
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    made = function(**{name: value for name, value in offered.items() if takes_any or name in parameters})
    if not isinstance(made, tuple) or not 2 <= len(made) <= 4 or not isinstance(made[0], nn.Module):
        raise UsageError(
            f"--model {spec} must return (model, batches), (model, batches, loss) or (model, batches, loss, optimizer) "
            f"with an nn.Module first, got {_told(made)}"
        )
    model, batches, loss, optimizer = (*made, None, None)[:4]
    if not isinstance(batches, Iterable):
        raise UsageError(f"the batches that {spec} returned must be iterable, got {type(batches).__name__}")
    for name, value in (("loss", loss), ("optimizer", optimizer)):
        if value is not None and not callable(value):
            raise UsageError(f"the {name} that {spec} returned must be callable, got {type(value).__name__}")
    return Workload(spec, model, batches, loss or default_loss, optimizer or _sgd)


def _told(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__
