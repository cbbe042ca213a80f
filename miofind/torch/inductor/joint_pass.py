"""The pass over Inductor's joint graphs of a forward and a backward pass."""

from __future__ import annotations

from torch import fx

from miofind.torch.inductor.masks import take_at_results
from miofind.torch.inductor.own_pass import OwnPass
from miofind.torch.inductor.upsamplings import gather_gradients


class JointPass(OwnPass):
    """Changes what a backward pass computes, and with it what is kept for it."""

    def rewrite(self, graph: fx.Graph) -> None:
        """Take derivatives at results, and gather gradients of upsamplings."""
        take_at_results(graph)
        gather_gradients(graph)
