"""The loss of published models: the cross-entropy of logits without a softcap.

Shapes: n tokens of a chunk, C channels, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor


class Uncapped:
    """The criterion of models whose logits are not softcapped; see nanochat.loss.Criterion.

    Every row of the head stands for a token.
    """

    def logits(self, raw: Tensor) -> Tensor:  # (n, V) -> (n, V) fp32
        """Return the logits of all tokens from the products of activations and head."""
        return raw.float()

    def losses(
        self,
        x: Tensor,  # (n, C)
        head: Tensor,  # (V, C) in x's dtype
        targets: Tensor,  # (n,)
        scale: Tensor,  # (n,) fp32 weight of each token, 0 = ignored
    ) -> tuple[Tensor, Tensor]:
        """Return weighted losses (n,), and the gradient (n, V) of their sum for the logits.

        The fp32 copy of the logits is overwritten by their gradient, because the vocabularies of
        published models are large.
        """
        raw = F.linear(x, head)
        index = targets.clamp_min(0)[:, None]
        top = raw.amax(dim=1, keepdim=True).float()
        target_logits = raw.gather(1, index).float()
        exponentials = raw.float().sub_(top).exp_()
        total = exponentials.sum(dim=1, keepdim=True)
        nll = (total.log() + top - target_logits).squeeze(1)
        exponentials.mul_(scale[:, None] / total).scatter_add_(1, index, -scale[:, None])
        return nll * scale, exponentials.to(x.dtype)
