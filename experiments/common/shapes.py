"""The matrix products of one rank in tensor-parallel Llama-3 and Qwen2 models, as data."""

import dataclasses

TOKENS = 8192
# hidden size, feed-forward size, columns of the fused query-key-value projection
MODELS = {
    "llama3-8b": (4096, 14336, 4096 + 2 * 1024),
    "llama3-70b": (8192, 28672, 8192 + 2 * 1024),
    "llama3-405b": (16384, 53248, 16384 + 2 * 1024),
    "qwen2-72b": (8192, 29568, 8192 + 2 * 1024),
}
RANKS = (2, 4, 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Gemm:
    """y[m, n] = x[m, k] @ w[k, n]; ``name`` says model, projection and ranks."""

    name: str
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


def local_gemms() -> tuple[Gemm, ...]:
    """Each rank's products over 8192 tokens, without repeats.

    ``ffn_in`` and ``qkv`` have their columns divided among the ranks (an all-gather comes before),
    ``ffn_out`` and ``attn_out`` their contraction (a reduce-scatter comes after).
    """
    found: dict[tuple[int, int, int], Gemm] = {}
    for model, (hidden, ffn, qkv) in MODELS.items():
        for ranks in RANKS:
            for projection, m, k, n in (
                ("ffn_in", TOKENS, hidden, ffn // ranks),
                ("ffn_out", TOKENS, ffn // ranks, hidden),
                ("qkv", TOKENS, hidden, qkv // ranks),
                ("attn_out", TOKENS, hidden // ranks, hidden),
            ):
                name = f"{model}/{projection}/tp{ranks}"
                found.setdefault((m, k, n), Gemm(name, m, k, n))
    return tuple(found.values())


NAMED = (
    "llama3-8b/ffn_in/tp2", "llama3-8b/ffn_out/tp2", "llama3-8b/qkv/tp4", "llama3-8b/attn_out/tp2",
    "llama3-70b/ffn_in/tp4", "llama3-70b/ffn_in/tp8", "llama3-70b/ffn_out/tp8",
    "llama3-70b/qkv/tp4", "llama3-70b/attn_out/tp4", "llama3-405b/attn_out/tp4",
    "qwen2-72b/ffn_in/tp4", "qwen2-72b/ffn_out/tp4",
)  # fmt: skip
"""Twelve of them, of every model, projection and number of ranks, for kernels to be compared on."""


def named_gemms() -> tuple[Gemm, ...]:
    """The products of ``NAMED``."""
    return tuple(gemm for gemm in local_gemms() if gemm.name in NAMED)
