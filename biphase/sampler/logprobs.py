"""Log-probabilities that clients see: of the model's own distribution, before penalties, bias and temperature."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from biphase.request import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """For each row the given token, then the likeliest `num_top` (which may include it), best first.

    Args:
        logits: float32 [num_rows, vocab_size]; not changed.
        token_ids: int64 [num_rows].
        num_top: one for each row; 0 gives the token alone.
    """
    wide = logits.log_softmax(-1)
    chosen = wide.gather(1, token_ids.unsqueeze(1))
    ranks = (wide > chosen).sum(-1).add_(1).tolist()
    most = min(max(num_top, default=0), logits.shape[1])
    values, ids = (part.tolist() for part in wide.topk(most, dim=-1)) if most else ([[]] * len(num_top),) * 2
    return [
        TokenLogprobs((token, *ids[i][:top]), (value, *values[i][:top]), rank)
        for i, (token, value, rank, top) in enumerate(
            zip(token_ids.tolist(), chosen.squeeze(1).tolist(), ranks, num_top, strict=True)
        )
    ]
