"""A language model with module names of its own and without support for parallelism."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, hidden: int, num_heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden // num_heads
        for x in "qkv":
            self.add_module(f"{x}_proj", nn.Linear(hidden, hidden, bias=False))
        self.o_proj = nn.Linear(hidden, hidden)
        for x in "qk":
            self.add_module(f"{x}_norm", nn.RMSNorm(self.head_dim) if qk_norm else nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(*x.shape[:2], -1))


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, hidden: int, qk_norm: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden)
        self.self_attn = Attention(hidden, 4, qk_norm)
        self.post_attention_layernorm = nn.RMSNorm(hidden)
        self.mlp = GatedMLP(hidden, 26)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class CausalLM(nn.Module):
    """Tokens [B, T] to logits [B, T, vocab_size]."""

    def __init__(self, vocab_size: int = 17, hidden: int = 16, qk_norm: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden, padding_idx=0)
        self.layers = nn.ModuleList(Layer(hidden, qk_norm) for _ in range(2))
        self.norm = nn.RMSNorm(hidden)
        # A scale that belongs to no module of a plan.
        self.scale = nn.Parameter(torch.ones(hidden))
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x) * self.scale)


PLAN = {
    "layers.*.self_attn.[qkv]_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_rep",
}
