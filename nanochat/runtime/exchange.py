"""Gives each rank whole matrices to work on if the ranks hold only some rows of each matrix.

The ranks exchange the rows of K matrices of one shape by all-to-all, so that each rank gets some
matrices whole, works on them, and sends the rows of the results back. Replicas hold the same rows:
each replica works on its share of the matrices, and then they gather each other's results.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.runtime.parallel import Place, gathered


class MatrixExchange:
    """Divides the work on K matrices of one shape (rows, cols) among the ranks.

    It collects whole matrices for each rank to work on, and distributes the results.
    """

    def __init__(
        self,
        place: Place,
        count: int,  # K
        rows: int,
        cols: int,
        first_owner: int,  # the shard that owns matrix 0; the next one owns matrix 1
        device: torch.device,
    ):
        self.place = place
        self.rows = rows
        self.cols = cols
        self.row_counts = place.row_counts(rows)  # shard -> rows of each matrix that it holds
        self.local_rows = self.row_counts[place.shard]
        owned: list[list[int]] = [[] for _ in range(place.shards)]
        for matrix in range(count):
            owned[(first_owner + matrix) % place.shards].append(matrix)
        self.owned_counts = [len(matrices) for matrices in owned]  # shard -> matrices it gets whole
        self.share = owned[place.shard][place.replica :: place.replicas]  # this rank works on these
        # On the device, since a list would be copied there in every step.
        by_owner = [matrix for matrices in owned for matrix in matrices]
        self._by_owner = torch.tensor(by_owner, device=device)  # (K,) the matrices of shard 0 first
        self._restore = self._by_owner.argsort()  # (K,) undoes that order

    def collect(
        self,
        local: Tensor,  # (K, local rows, cols)
    ) -> Tensor:  # (len(share), rows, cols)
        """Return the whole matrices that this rank works on, from the rows that all ranks hold."""
        matrices = local if self.place.shards == 1 else self._to_owners(local)
        return matrices[self.place.replica :: self.place.replicas]

    def distribute(
        self,
        results: Tensor,  # (len(share), rows, cols) fp32
        dtype: torch.dtype,  # to send in
    ) -> Tensor:  # (K, local rows, cols) fp32
        """Return this rank's rows of all K results, given the results that this rank computed."""
        if self.place.replicas > 1:
            results = self._from_replicas(results, dtype)
        if self.place.shards > 1:
            results = self._to_rows(results, dtype)
        return results

    def _to_owners(self, local: Tensor) -> Tensor:
        """Exchange rows, and return the matrices that this shard owns, (owned, rows, cols)."""
        owned = self.owned_counts[self.place.shard]
        outgoing = local.index_select(0, self._by_owner).flatten()
        sizes_out = [count * self.local_rows * self.cols for count in self.owned_counts]
        sizes_in = [owned * rows * self.cols for rows in self.row_counts]
        parts = self._all_to_all(outgoing, sizes_out, sizes_in).split(sizes_in)
        blocks = [
            received.view(owned, rows, self.cols)
            for received, rows in zip(parts, self.row_counts, strict=True)
        ]
        return torch.cat(blocks, dim=1)

    def _from_replicas(self, results: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather the results of all replicas, and return them in order, (owned, rows, cols)."""
        replicas = self.place.replicas
        owned = self.owned_counts[self.place.shard]
        largest_share = -(-owned // replicas)
        padded = results.new_zeros(largest_share, self.rows, self.cols, dtype=dtype)
        padded[: results.size(0)] = results
        parts = gathered(padded, replicas, self.place.replica_group)
        # matrix i was computed by replica i % replicas
        return torch.stack(parts, dim=1).flatten(0, 1)[:owned].float()

    def _to_rows(self, results: Tensor, dtype: torch.dtype) -> Tensor:
        """Send the results' rows to their ranks; return this rank's rows, (K, local rows, cols)."""
        blocks = results.split(self.row_counts, dim=1)
        outgoing = torch.cat([block.to(dtype).flatten() for block in blocks])
        sizes_out = [results.size(0) * rows * self.cols for rows in self.row_counts]
        sizes_in = [count * self.local_rows * self.cols for count in self.owned_counts]
        incoming = self._all_to_all(outgoing, sizes_out, sizes_in)
        by_owner = incoming.view(sum(self.owned_counts), self.local_rows, self.cols)
        return by_owner.index_select(0, self._restore).float()

    def _all_to_all(self, outgoing: Tensor, sizes_out: list[int], sizes_in: list[int]) -> Tensor:
        incoming = outgoing.new_empty(sum(sizes_in))
        dist.all_to_all_single(
            incoming,
            outgoing,
            sizes_in,
            sizes_out,
            group=self.place.shard_group,
        )
        return incoming
