"""Rules that rename T5's variables from their TensorFlow names to their T5X names.

>>> from treering.formats.t5_names import T5_TO_T5X
>>> print(tr.open("t5-small/model.ckpt-1000000").apply(T5_TO_T5X))

They cover T5 and T5 1.1 of any size, encoder and decoder. They also cover language models, whose single tower is called
transformer in TensorFlow and decoder in T5X. The state of Adafactor goes to ``state/param_states``.
"""

import re

from .._rules.base import Leaves, Rule
from ..rules import rename

_NORMS = (
    ("encoder", 0, "pre_attention_layer_norm"),
    ("encoder", 1, "pre_mlp_layer_norm"),
    ("decoder", 0, "pre_self_attention_layer_norm"),
    ("decoder", 1, "pre_cross_attention_layer_norm"),
    ("decoder", 2, "pre_mlp_layer_norm"),
    ("transformer", 0, "pre_self_attention_layer_norm"),
    ("transformer", 1, "pre_mlp_layer_norm"),
)
_MATRICES = {"q": "query", "k": "key", "v": "value", "o": "out"}
_SLOTS = {"vr": "v_row", "vc": "v_col", "v": "v", "m": "m"}
_BIAS = r"^({})/block_0*(\d+)/layer_0*0/SelfAttention/relative_attention_bias"


class _PositionBiases:
    """Renames the position biases of a tower.

    A bias that all layers share gets a path without a layer. In TensorFlow it is stored with the first layer. Separate
    biases stay with their layers.
    """

    def apply(self, leaves: Leaves) -> Leaves:
        for tower in ("encoder", "decoder"):
            pattern = _BIAS.format(tower)
            shared = {found[2] for path in leaves if (found := re.search(pattern, path))} == {"0"}
            place = "" if shared else r"/layers_\2"
            leaves = rename(pattern, rf"\1{place}/relpos_bias/rel_embedding", optional=True).apply(leaves)
        return leaves


_RENAMED = (
    (r"^global_step$", "state/step"),
    (r"^shared/embedding", "token_embedder/embedding"),
    *(
        (rf"^{tower}/block_0*(\d+)/layer_0*{layer}/(?:layer|rms)_norm/scale", rf"{tower}/layers_\1/{norm}/scale")
        for tower, layer, norm in _NORMS
    ),
    (r"^transformer/", "decoder/"),
    (r"^(encoder|decoder)/embedding", r"\1/token_embedder/embedding"),
    (r"^decoder/logits/kernel", "decoder/logits_dense/kernel"),
    (r"^(encoder|decoder)/(?:final_layer|rms)_norm/scale", r"\1/\1_norm/scale"),
    (r"^(encoder|decoder)/block_0*(\d+)/layer_\d+/DenseReluDense/(w[io](?:_\d+)?/kernel)", r"\1/layers_\2/mlp/\3"),
    *(
        (rf"^{tower}/block_0*(\d+)/layer_\d+/{kind}/{matrix}(?=$|_slot_)", rf"{tower}/layers_\1/{new}/{name}/kernel")
        for tower, kind, new in (
            ("encoder", "SelfAttention", "attention"),
            ("decoder", "SelfAttention", "self_attention"),
            ("decoder", "EncDecAttention", "encoder_decoder_attention"),
        )
        for matrix, name in _MATRICES.items()
    ),
)
_PLACED = (
    *((rf"^(.+)_slot_{slot}$", rf"state/param_states/\1/{name}") for slot, name in _SLOTS.items()),
    (r"^(?!state/)(.+)$", r"target/\1"),
)

T5_TO_T5X: tuple[Rule, ...] = (
    *(rename(pattern, new, optional=True) for pattern, new in _RENAMED),
    _PositionBiases(),
    *(rename(pattern, new, optional=True) for pattern, new in _PLACED),
)
"""The rules, in order. Each applies to all names before the next one does."""
