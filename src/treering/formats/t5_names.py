"""The names of T5's variables in TensorFlow, and what T5X calls them.

>>> from treering import rules
>>> from treering.formats.t5_names import T5_TO_T5X
>>> to_t5x = [rules.rename(pattern, new, optional=True) for pattern, new in T5_TO_T5X]
>>> print(tr.open("t5-small/model.ckpt-1000000").apply(to_t5x))

Those of T5 and T5 1.1, encoder and decoder, of any size; position biases are those that all layers share, as in all
released models. Adafactor's state lies below ``state/param_states``. The rules go in order, each over all names.
"""

_NORMS = (
    ("encoder", 0, "pre_attention_layer_norm"),
    ("encoder", 1, "pre_mlp_layer_norm"),
    ("decoder", 0, "pre_self_attention_layer_norm"),
    ("decoder", 1, "pre_cross_attention_layer_norm"),
    ("decoder", 2, "pre_mlp_layer_norm"),
)
_MATRICES = {"q": "query", "k": "key", "v": "value", "o": "out"}
_SLOTS = {"vr": "v_row", "vc": "v_col", "v": "v", "m": "m"}

T5_TO_T5X: tuple[tuple[str, str], ...] = (
    (r"^global_step$", "state/step"),
    (r"^shared/embedding", "token_embedder/embedding"),
    (r"^(encoder|decoder)/embedding", r"\1/token_embedder/embedding"),
    (r"^decoder/logits/kernel", "decoder/logits_dense/kernel"),
    (r"^(encoder|decoder)/(?:final_layer|rms)_norm/scale", r"\1/\1_norm/scale"),
    (r"^(encoder|decoder)/block_000/layer_000/SelfAttention/relative_attention_bias", r"\1/relpos_bias/rel_embedding"),
    *(
        (rf"^{tower}/block_0*(\d+)/layer_0*{layer}/(?:layer|rms)_norm/scale", rf"{tower}/layers_\1/{norm}/scale")
        for tower, layer, norm in _NORMS
    ),
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
    *((rf"^(.+)_slot_{slot}$", rf"state/param_states/\1/{name}") for slot, name in _SLOTS.items()),
    (r"^(?!state/)(.+)$", r"target/\1"),
)
