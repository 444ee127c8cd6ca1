"""The keys of ``[model]``: the dimensions of a model and what each of its layers computes, without torch.

A family of models is a choice of values, not code. With LN a norm, a block is one of

    norm_placement = before   x + A(LN(x))           then the same with the MLP     GPT-2, Llama, Qwen
                     after    x + LN(A(x))                                          OLMo 2
                     both     x + LN(A(LN(x)))                                      Gemma 2
    block = parallel          x + A(LN(x)) + MLP(LN(x)), one norm or two            Falcon, GPT-NeoX
"""

from typing import Literal

from pydantic import Field

from myriad.config import Config
from myriad.kernels.config import Activation
from myriad.kernels.rotary_scaling import RotaryScaling

__all__ = ["ModelKeys"]


class ModelKeys(Config):
    """A decoder transformer, as `myriad.model.config.ModelConfig` completes it.

    The upper bounds are far above any model, and low enough that a mistyped dimension is refused at once."""

    layers: int = Field(4, ge=1, le=10_000)
    """Number of transformer blocks."""
    hidden: int = Field(128, ge=8, le=2**20)
    """Width of the residual stream."""
    heads: int = Field(4, ge=1, le=2**16)
    """Number of attention (query) heads."""
    kv_heads: int | None = Field(None, ge=1, le=2**16)
    """Key/value heads (grouped-query attention); off: as many as query heads. With fewer heads than
    layout.tp, several ranks hold each head."""
    head_dim: int | None = Field(None, ge=2, le=2**16)
    """Width of one head; off: hidden / heads."""
    kv_lora_rank: int | None = Field(None, ge=1, le=2**20)
    """Width of the latent from which a token's keys and values are computed: multi-head latent attention
    (DeepSeek-V2). off: heads have keys and values of their own."""
    q_lora_rank: int | None = Field(None, ge=1, le=2**20)
    """Width of the latent from which queries are computed (with model.kv_lora_rank); off: none."""
    qk_nope_head_dim: int = Field(128, ge=1, le=2**16)
    """Width of the part of each query and key without positions (with model.kv_lora_rank)."""
    qk_rope_head_dim: int = Field(64, ge=2, le=2**16)
    """Width of the rotated part of each query, and of the key that all heads share (with
    model.kv_lora_rank)."""
    v_head_dim: int = Field(128, ge=1, le=2**16)
    """Width of each head's value (with model.kv_lora_rank)."""
    ffn_hidden: int | None = Field(None, ge=8, le=2**24)
    """Inner width of the MLP; off: 4 x hidden."""
    experts: int | None = Field(None, ge=2, le=4096)
    """Experts of each block: MLPs of which every token takes a few (mixture of experts); off: one MLP, which
    every token takes."""
    dense_layers: int = Field(0, ge=0, le=10_000)
    """Blocks at the start that have one MLP in place of experts (with model.experts; DeepSeek-V3: 3)."""
    expert_every: int = Field(1, ge=1, le=10_000)
    """Distance between blocks with experts (with model.experts); the blocks between have one MLP. 1: every
    block has experts."""
    experts_per_token: int = Field(2, ge=1, le=256)
    """Experts that compute each token (with model.experts)."""
    expert_hidden: int | None = Field(None, ge=8, le=2**24)
    """Inner width of each expert (with model.experts); off: that of an MLP, model.ffn_hidden."""
    shared_experts: int = Field(0, ge=0, le=64)
    """Experts that every token takes besides (with model.experts), as one MLP of their joint width
    (DeepSeek)."""
    shared_expert_gate: bool = False
    """Multiply what the shared experts compute of a token by the sigmoid of a product of its own (with
    model.shared_experts; Qwen 2 MoE)."""
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """What makes positive scores of the router's products (with model.experts): softmax over all experts, or
    sigmoid of each (DeepSeek-V3)."""
    router_normalized: bool = True
    """Divide the scores of a token's experts by their sum (with model.experts)."""
    router_logit_bias: bool = False
    """Add a learned bias of each expert to the router's products (with model.experts; GPT-OSS). It counts in
    scores, unlike the bias of model.balance_bias_rate."""
    router_scale: float = Field(1.0, gt=0, le=1e6)
    """Factor of what the chosen experts compute (with model.experts; DeepSeek-V3: 2.5)."""
    router_groups: int = Field(1, ge=1, le=4096)
    """Groups of consecutive experts, of which a token chooses some before it chooses experts (with
    model.experts; DeepSeek-V3: 8). 1: all experts are one group."""
    router_group_limit: int = Field(1, ge=1, le=4096)
    """Groups of which each token's experts are (with model.router_groups; DeepSeek-V3: 4)."""
    router_group_score: Literal["largest", "two_largest"] = "largest"
    """What groups are chosen by (with model.router_groups): the score of their best expert (DeepSeek-V2), or
    the sum of their two best, biases included (DeepSeek-V3)."""
    expert_capacity: float | None = Field(None, gt=0, le=4096)
    """Lossy: in training an expert computes at most this many times its even share of a sequence's tokens
    (with model.experts), rounded up; of the tokens that chose it, those at later positions are dropped, and
    get nothing from it. 2 drops few. Evaluation and generation drop none. off: no token is dropped."""
    balance_loss: float = Field(0.01, ge=0, le=100)
    """Weight of the loss that training adds so that experts get equally many tokens of each sequence, or of
    each batch (model.balance_scope; with model.experts). 0: none."""
    balance_scope: Literal["sequence", "batch"] = "sequence"
    """Whose loads weight the balance loss (with model.experts). sequence: those of the token's sequence.
    batch: those of the global batch of the step before, which lets experts specialize in some sequences."""
    balance_bias_rate: float | None = Field(None, ge=0, le=1)
    """Balance without a loss: each expert has a bias, which counts only where experts are chosen, and which
    each step raises by this much if the expert had fewer tokens of the global batch than the mean, or lowers
    (with model.experts; DeepSeek-V3: 0.001, at last 0). 0: biases stay as they are; off: none."""
    router_z_loss: float = Field(0.0, ge=0, le=100)
    """Weight of the square of each token's log-sum-exp of the router's products, which training adds to the
    loss (with model.experts; ST-MoE: 0.001)."""
    vocabulary: int = Field(4096, ge=2, le=2**26)
    """Tokens in the vocabulary, before padding."""
    vocabulary_multiple: int = Field(64, ge=1, le=2**20)
    """In memory the embedding is padded to a multiple of this number, for faster products. Checkpoints,
    losses and norms have no padding, and layout.tp need not divide it."""
    sequence: int = Field(256, ge=2, le=2**30)
    """Number of tokens in a sequence."""
    block: Literal["serial", "parallel"] = "serial"
    """serial: attention, then MLP; parallel: y = x + MLP(LN(x)) + Attention(LN(x))."""
    parallel_norms: Literal[1, 2] = 1
    """Norms of a parallel block: one for both branches, or one each (GPT-NeoX)."""
    window: int | None = Field(None, ge=1, le=2**30)
    """Attention window: a token attends to itself and the window - 1 tokens before it. off: to all tokens
    before it."""
    window_pattern: tuple[bool, ...] = (True,)
    """Layers that use model.window, repeated over the layers: [true, false] means every other layer."""
    qk_norm: Literal["none", "head", "heads", "all"] = "none"
    """Norm of queries and of keys: head: over each head, with weights that all heads share (Qwen 3); heads:
    over each head, with weights of its own (StableLM 2 12B); all: over all heads together (OLMo 2)."""
    qk_norm_kind: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm over each head (StableLM), of queries and keys."""
    qk_norm_bias: bool = False
    """Add biases to the LayerNorms of queries and keys (Megatron-LM). Every layer needs rotary positions:
    elsewhere softmax cancels the biases of keys, and rounding alone would change them."""
    attention_scale: float | None = Field(None, gt=0, le=1e6)
    """Factor of the products of queries and keys; off: 1 / sqrt(head size)."""
    attention_softcap: float | None = Field(None, gt=0, le=1e6)
    """Bound c of attention scores, which become c tanh(score / c) (Gemma 2); off: no bound."""
    attention_sinks: bool = False
    """Give each head a learned score that takes a share of the softmax and has no value (GPT-OSS)."""
    position: Literal["rotary", "learned", "none"] = "rotary"
    """Position encoding: rotary, learned embeddings, or none."""
    rotary_base: float = Field(10000.0, gt=1)
    """Base of the rotary frequencies."""
    rotary_fraction: float = Field(1.0, gt=0, le=1)
    """Fraction of each head's values that are rotated, the first ones."""
    rotary_pattern: tuple[bool, ...] = (True,)
    """Layers that use rotary positions, repeated over the layers; the others have none (SmolLM 3)."""
    window_rotary_base: float | None = Field(None, gt=1)
    """Base of the rotary frequencies, without scaling, in layers that use model.window (Gemma 3); off: as in
    other layers."""
    rotary_scaling: RotaryScaling = RotaryScaling()
    norm: Literal["rms", "layer"] = "rms"
    """Kind of the norms. rms: RMSNorm; layer: LayerNorm."""
    norm_epsilon: float = Field(1e-5, gt=0)
    """Added under the square root of each norm; the norms of latents (model.kv_lora_rank) add 1e-6."""
    norm_placement: Literal["before", "after", "both"] = "before"
    """Norms of a serial block: of the input of attention and MLP, of their outputs (OLMo 2), or of both
    (Gemma 2)."""
    norm_zero_centered: bool = False
    """Multiply by 1 + weight in each RMSNorm, with weights that start at 0 (Gemma)."""
    norm_bias: bool = False
    """Add biases to LayerNorms even if model.bias is off."""
    activation: Activation = "gelu"
    """Activation function of the MLP (gelu_tanh: GPT-2's approximation; relu2: max(x, 0)^2; swiglu, geglu:
    with a gate; clamped_swiglu: g sigmoid(1.702 g) (v + 1) of a gate up to 7 and a value between -7 and 7,
    GPT-OSS)."""
    bias: bool = False
    """Add biases to linear layers, experts' too, and LayerNorms. Key projections have none: without rotary
    positions softmax cancels it, so its gradient would be rounding noise. Routers have one of their own,
    model.router_logit_bias."""
    attention_bias: Literal["default", "qkv", "all"] = "default"
    """Biases of attention: default: as model.bias; qkv: of queries, keys and values (Qwen 2); all: of the
    output projection too."""
    tied: bool = True
    """Share the token embedding with the output projection."""
    embedding_scale: float = Field(1.0, gt=0, le=1e6)
    """Factor of the token embeddings (Gemma: sqrt(hidden))."""
    residual_scale: float = Field(1.0, gt=0, le=1e6)
    """Factor of what attention and MLP add to the residual stream (Granite, MiniCPM)."""
    logit_scale: float = Field(1.0, gt=0, le=1e6)
    """Factor of the logits (Granite, MiniCPM)."""
    logit_softcap: float | None = Field(None, gt=0, le=1e6)
    """Bound c of the logits, which become c tanh(logit / c) (Gemma 2); off: no bound."""
    z_loss: float = Field(0.0, ge=0, le=1)
    """Weight of the square of each token's log-sum-exp of logits, which training adds to the loss (PaLM, OLMo
    2: 1e-5 to 1e-4). Validation leaves it out."""
    prediction_layers: int = Field(0, ge=0, le=16)
    """Blocks after the last one that learn to predict the tokens after the next one, each one token farther
    (multi-token prediction, DeepSeek-V3). Only training computes them."""
    prediction_input: Literal["stream", "normed"] = "stream"
    """What a prediction layer gets of the layer before (with model.prediction_layers): its output, or that
    output after the norm of its own predictions (the published weights of DeepSeek-V3)."""
    prediction_weight: float = Field(0.1, gt=0, le=10)
    """Weight of the mean loss of the prediction layers, which training adds to the loss (DeepSeek-V3: 0.3,
    later 0.1)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Fraction of embedding and residual-branch outputs set to zero in training. Every layout drops the
    same values."""
    initial_deviation: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights; divided by sqrt(2 layers) for projections into the
    residual stream."""
    mup_base_width: int | None = Field(None, ge=1, le=2**20)
    """Width of the model whose learning rate and initial values this one takes over: with m = model.hidden /
    mup_base_width, the blocks' matrices start 1/sqrt(m) and learn 1/m as fast, logits are divided by m, and
    attention scores are scaled by 1 / head size (maximal update parametrization); off: as at any width."""
