"""Sums in an order that does not depend on the number of processes: the same bits on 1, 2, 4, ... of them."""

import torch
import torch.distributed as dist


class TreeSum:
    """Adds up gradients and loss as a binary tree over the micro-batches, its lower part in each process, its
    upper part between the processes. So any power of two of processes ends with the same bits."""

    def __init__(self, distributed, model):
        self.rank, self.world_size = distributed.rank, distributed.world_size
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.parts = []  # (level, vector)

    def add(self, loss):
        """Take over the gradients of a micro-batch, and its loss."""
        loss = loss.detach().reshape(1).to(self.params[0].dtype)
        level, vector = 0, torch.cat([p.grad.reshape(-1) for p in self.params] + [loss])
        for p in self.params:
            p.grad = None
        while self.parts and self.parts[-1][0] == level:  # as a binary counter carries
            level, vector = level + 1, self.parts.pop()[1] + vector
        self.parts.append((level, vector))

    def mean(self):
        """Give every parameter its gradient, the mean over the processes; returns that of the loss."""
        (_, vector), = self.parts
        self.parts, distance = [], 1
        while distance < self.world_size:
            # a + b is b + a, so both have the same bits
            vector = vector + self.exchange(vector, self.rank ^ distance)
            distance *= 2
        vector /= self.world_size  # a power of two: exact
        sizes = [p.numel() for p in self.params]
        for p, grad in zip(self.params, vector[:-1].split(sizes)):
            p.grad = grad.view_as(p)
        return vector[-1].clone()

    def exchange(self, vector, other):
        """The vector of the process `other`, which gets ours."""
        received = torch.empty_like(vector)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, vector, other),
                                        dist.P2POp(dist.irecv, received, other)])
        for work in works:
            work.wait()
        return received
