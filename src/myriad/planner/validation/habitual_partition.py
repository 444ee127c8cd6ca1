"""How other frameworks divide the layers of a published run among its stages (`LayoutHabits.partition`).

A pipeline's layers are the embedding, the blocks, and the head, which has the prediction layers, if there are
any. Of 61 blocks and a prediction layer on 16 stages, Megatron-Core's rule gives what its recipes of DeepSeek
write as ``Et*4|(t*4|)*14tmL``; of 94 blocks on 4 stages it gives 23, 24, 24 and 23.
"""

from itertools import accumulate, islice

from myriad.model.config import ModelConfig
from myriad.planner.frameworks import PartitionHabit

__all__ = ["habitual_partition"]


def habitual_partition(habit: PartitionHabit, model: ModelConfig, num_stages: int) -> str:
    """Return ``layout.partition`` of a framework with this habit."""
    if habit in ("balanced", "cumulative"):
        return _by_products(model, num_stages, even=habit == "balanced")
    if habit == "with-ends":
        return _with_ends(model, num_stages)
    if habit == "megatron" and model.layers % num_stages:
        ends = _with_ends(model, num_stages)
        return _rounded_up(model, num_stages) if ends == "uniform" else ends
    return "uniform"


def _with_ends(model: ModelConfig, num_stages: int) -> str:
    """Return the partition into stages of as many layers, embedding and head included."""
    each, rest = divmod(model.layers + 2, num_stages)
    cuts = range(each, model.layers + 2, each) if each and not rest else ()
    return f"manual:{','.join(map(str, cuts))}" if cuts else "uniform"


def _rounded_up(model: ModelConfig, num_stages: int) -> str:
    """Return the partition into equal numbers of blocks, rounded up, of which the last stage has what is
    left. Where nothing is left for it, the first stage has fewer too."""
    each = -(-model.layers // num_stages)
    last = max(0, model.layers - each * (num_stages - 1))
    first = model.layers - last - each * (num_stages - 2)
    if first < 1:
        return "uniform"
    cuts = accumulate([1 + first, *[each] * (num_stages - 2)])
    return f"manual:{','.join(map(str, cuts))}"


def _by_products(model: ModelConfig, num_stages: int, *, even: bool) -> str:
    """Return the partition by products: nanotron's rule (src/nanotron/models/base.py). ``even``: where it
    leaves stages empty, return equal numbers of blocks with the head alone on the last stage."""
    blocks = [_active_parameters(model, layer) for layer in range(model.layers)]
    head = float(model.vocabulary * model.hidden * (1 + model.prediction_layers))
    head += sum(_active_parameters(model, model.layers + n) for n in range(model.prediction_layers))
    share, passed, cuts = (sum(blocks) + head) / num_stages, 0.0, list[int]()
    for layer, block in enumerate(blocks, 1):
        passed += block
        if passed > share * (len(cuts) + 1) and len(cuts) < num_stages - 1:
            cuts.append(layer + 1)
    if even and len(cuts) < num_stages - 1 <= model.layers:
        cuts = [1 + model.layers * stage // (num_stages - 1) for stage in range(1, num_stages)]
    # nanotron puts head and loss on ranks of their own, or leaves ranks empty: cut at the end instead.
    rest = (layer for layer in range(model.layers + 1, 1, -1) if layer not in cuts)
    cuts = sorted([*cuts, *islice(rest, num_stages - 1 - len(cuts))])
    return f"manual:{','.join(map(str, cuts))}" if len(cuts) == num_stages - 1 else "uniform"


def _active_parameters(model: ModelConfig, layer: int) -> float:
    """Return the parameters of a block that multiply a token."""
    one = model.of_block(layer)
    idle = one.stored_width - one.active_width
    return one.block_parameters - idle * (one.up_matrices + 1) * one.hidden
