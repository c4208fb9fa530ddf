"""Muon and Adam over the processes that share a batch."""

import math

import torch
from torch import Tensor, nn
from training.model import WIDTH


def shared(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """Their mean over the processes, in fp32; every process has the same ones missing."""
    there = [t for t in tensors if t is not None]
    flat = torch.cat([t.float().flatten() for t in there])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(flat)
        flat /= torch.distributed.get_world_size()
    parts = iter(flat.split([t.numel() for t in there]))
    return [None if t is None else next(parts).view_as(t) for t in tensors]


def orthogonal(g: Tensor) -> Tensor:
    """Newton-Schulz: the nearest matrices with equal singular values, roughly (Muon)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() / (g.flatten(1).norm(dim=1).view(-1, 1, 1) + 1e-7)
    if tall := x.shape[1] > x.shape[2]:
        x = x.transpose(1, 2)
    for _ in range(5):
        s = x @ x.transpose(1, 2)
        x = a * x + (b * s + c * s @ s) @ x
    return (x.transpose(1, 2) if tall else x).float()


class Optimizer:
    """Muon for the matrices inside the blocks, Adam for the rest; fp32 masters of bf16 weights and their mean."""

    def __init__(self, learner: nn.Module):
        self.names, self.params = zip(*learner.named_parameters(), strict=True)
        self.master = [p.detach().float().clone() for p in self.params]
        self.mean = [m.clone() for m in self.master]
        self.first = [torch.zeros_like(m) for m in self.master]
        self.second = [torch.zeros_like(m) if not self.is_matrix(i) else None for i, m in enumerate(self.master)]
        self.sees = ["vision_tower" in n or "projector" in n for n in self.names]
        self.groups: dict[tuple, list[int]] = {}
        for i, p in enumerate(self.params):
            if self.is_matrix(i):
                self.groups.setdefault(tuple(p.shape), []).append(i)

    def is_matrix(self, i: int) -> bool:
        """Whether Muon updates it."""
        name = self.names[i]
        return self.params[i].ndim >= 2 and any(
            part in name for part in (".blocks.", ".layers.", "projector", "patch_embed")
        )

    @torch.no_grad()
    def step(self, n: int, rates: tuple[float, float]) -> float:
        """One update; `rates` of the tower and of the rest are relative to the peak."""
        grads = shared([p.grad for p in self.params])
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads if g is not None))
        clip = min(1.0, 2.0 / (norm + 1e-6))
        turns = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        mine = torch.distributed.get_rank() if turns > 1 else 0
        updates: list[Tensor | None] = [None] * len(grads)
        for shape, members in self.groups.items():
            members = [i for i in members if grads[i] is not None]
            for i in members:
                self.first[i].lerp_(grads[i], 0.05)
                updates[i] = torch.zeros(shape)
            here = members[mine::turns]  # each process makes its share of the updates
            if not here:
                continue
            pushed = torch.stack([grads[i].lerp(self.first[i], 0.95) for i in here])
            split = shape[0] // WIDTH if "qkv" in self.names[here[0]] else 1  # q, k and v are three matrices
            pushed = orthogonal(pushed.view(len(here) * split, shape[0] // split, -1))
            pushed *= turns * 0.02 * max(1.0, pushed.shape[1] / pushed.shape[2]) ** 0.5
            for i, update in zip(here, pushed.view(len(here), *shape), strict=True):
                updates[i] = update
        for i, update in enumerate(shared(updates)):
            if update is not None:
                rate = rates[0] if self.sees[i] else rates[1]
                self.master[i].mul_(1 - rate * 0.001).add_(update, alpha=-rate)
        for i, g in enumerate(grads):
            if g is None or self.second[i] is None:
                continue
            g = g * clip
            self.first[i].lerp_(g, 0.1)
            self.second[i].lerp_(g.square(), 0.02)
            k = n + 1
            update = (self.first[i] / (1 - 0.9**k)) / ((self.second[i] / (1 - 0.98**k)).sqrt() + 1e-8)
            if "embed_tokens" in self.names[i]:  # all rows drift together, which would make the words look alike; the
                self.master[i].add_(
                    update, alpha=-1e-3 * rates[1]
                )  # logits do not change when their mean is taken away
                self.master[i].sub_(self.master[i].mean(0))
            else:
                self.master[i].add_(update, alpha=-3e-3 * (rates[0] if self.sees[i] else rates[1]))
        keep = min(0.99, (n + 1) / (n + 20))
        torch._foreach_lerp_(self.mean, self.master, 1 - keep)
        for p, m in zip(self.params, self.master, strict=True):
            p.copy_(m)
            p.grad = None
        return norm

    def state(self) -> dict:
        """What a checkpoint keeps."""
        return {"master": self.master, "mean": self.mean, "first": self.first, "second": self.second}

    def load(self, state: dict) -> None:
        """A checkpoint, back."""
        self.master, self.mean, self.first, self.second = (state[k] for k in ("master", "mean", "first", "second"))
        with torch.no_grad():
            for p, m in zip(self.params, self.master, strict=True):
                p.copy_(m)
