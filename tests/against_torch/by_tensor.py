"""Clipping tensor by tensor in plain PyTorch, and a network with everything that may go wrong."""

import math

import torch
from torch import nn
from torch.nn import functional as F

STEPS, SAMPLES, LENGTH, TOKENS, WIDTH = 6, 8, 3, 9, 6

MODES = {
    "none": (None, {}),
    "value": (0.01, {}),
    "adaptive": (0.02, {"exclude": ["blocks.1.norm.*"]}),
    "per_parameter": (0.05, {}),
    "adagc": (1.02, {"warmup_steps": 2, "absolute": 0.2, "beta": 0.9}),
    "update": (0.9, {}),
}
"""Threshold and options of each mode that decides tensor by tensor."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, inputs):
        return inputs + self.norm(self.linear(inputs).tanh())


class Net(nn.Module):
    """A tied embedding, a vector used twice, branches by the batch, frozen and unused layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.left, self.right, self.never, self.frozen = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, TOKENS)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        branch = self.left if int(tokens[0, 0]) % 2 else self.right
        hidden = branch(hidden) * self.scale + self.frozen(hidden) * self.scale
        return self.head(hidden.mean(1))


def network():
    """The same weights each time, with a hook of a user."""
    torch.manual_seed(0)
    net = Net().double()
    net.blocks[0].linear.weight.register_hook(lambda gradient: gradient * 2.0)
    return net


def optimizers(net):
    """Two of them, with weight decay inside of the gradient and beside it."""
    decayed = [*net.blocks.parameters(), *net.never.parameters(), net.scale]
    ids = {id(parameter) for parameter in decayed}
    others = [p for p in net.parameters() if id(p) not in ids]
    return [
        torch.optim.AdamW(decayed, lr=0.02, weight_decay=0.3, fused=True),
        torch.optim.Adam(others, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9)),
    ]


def batch(step, micro):
    """Tokens and targets of both ranks; each half chooses a branch."""
    generator = torch.Generator().manual_seed(10 * step + micro)
    tokens = torch.randint(0, TOKENS, (SAMPLES, LENGTH), generator=generator)
    if step % 3 == 2:
        tokens[:, 0] = 2
    return tokens, torch.randint(0, TOKENS, (SAMPLES,), generator=generator)


def norm_of(tensors):
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


class Plain:
    """Clips by one mode in plain PyTorch, and steps; returns both norms and the share clipped."""

    def __init__(self, net, made, mode):
        self.net, self.made, self.mode = net, made, mode
        self.limit, self.options = MODES[mode]
        self.gamma, self.count, self.rms = {}, 0, {}

    def step(self):
        named = {n: p for n, p in self.net.named_parameters() if p.grad is not None}
        gradients = {name: parameter.grad for name, parameter in named.items()}
        before, self.rms = norm_of(gradients.values()), {}
        shares = getattr(self, self.mode)(named, before)
        after = norm_of(gradients.values())
        old = {name: parameter.detach().clone() for name, parameter in named.items()}
        for optimizer in self.made:
            optimizer.step()
        for name, rms in self.rms.items():
            named[name].data.lerp_(old[name], 1.0 - 1.0 / max(1.0, rms / self.limit))
        for optimizer in self.made:
            optimizer.zero_grad()
        return before, after, sum(map(sum, shares)) / max(1, sum(map(len, shares)))

    def none(self, named, before):
        return []

    def value(self, named, before):
        found = []
        for parameter in named.values():
            found.append((parameter.grad.abs() > self.limit).flatten().tolist())
            parameter.grad.clamp_(-self.limit, self.limit)
        return found

    def adaptive(self, named, before):
        found = []
        for name, parameter in named.items():
            if name.startswith("blocks.1.norm"):
                continue
            dims = [*range(1, parameter.ndim)] or None
            keep = parameter.ndim > 1
            weight = torch.linalg.vector_norm(parameter.detach(), dim=dims, keepdim=keep)
            norm = torch.linalg.vector_norm(parameter.grad, dim=dims, keepdim=keep)
            most = self.limit * weight.clamp(min=1e-3)
            found.append((norm > most).flatten().tolist())
            parameter.grad.mul_(torch.where(norm > most, most / norm, 1.0))
        return found

    def per_parameter(self, named, before):
        found = []
        for parameter in named.values():
            norm = norm_of([parameter.grad])
            found.append([norm > self.limit])
            parameter.grad.mul_(min(1.0, self.limit / norm))
        return found

    def adagc(self, named, before):
        found, options = [], self.options
        for name, parameter in named.items():
            norm, past = norm_of([parameter.grad]), self.gamma.get(name, math.inf)
            if self.count < options["warmup_steps"]:
                factor = min(1.0, options["absolute"] / before)
                self.gamma[name] = min(past, norm * factor)
            else:
                factor = min(1.0, self.limit * past / norm)
                mixed = options["beta"] * past + (1 - options["beta"]) * norm * factor
                self.gamma[name] = norm * factor if math.isinf(past) else mixed
            found.append([factor < 1.0])
            parameter.grad.mul_(factor)
        self.count += 1
        return found

    def _moments(self, named):
        """The second moment of each parameter before the step, β, the steps so far, and g."""
        for optimizer in self.made:
            for group in optimizer.param_groups:
                for name, parameter in named.items():
                    if any(parameter is each for each in group["params"]):
                        state = optimizer.state[parameter]
                        coupled = 0.1 if type(optimizer) is torch.optim.Adam else 0.0
                        v = state.get("exp_avg_sq", torch.zeros_like(parameter))
                        steps = float(state.get("step", 0.0))
                        g = parameter.grad + coupled * parameter.detach()
                        yield name, v, group["betas"][1], steps, g

    def update(self, named, before):
        found = []
        for name, v, beta, steps, g in self._moments(named):
            new = (beta * v + (1 - beta) * g.square()) / (1 - beta ** (steps + 1))
            self.rms[name] = float((g.square() / new.clamp(min=1e-16)).mean().sqrt())
            found.append([self.rms[name] > self.limit * (1 + 1e-6)])
            if not found[-1][0]:
                self.rms[name] = 0.0
        return found


def train_plain(mode, micros):
    """Rows of (‖G‖, ‖G‖ clipped, share) and the weights, by one process over both halves."""
    net = network()
    plain = Plain(net, optimizers(net), mode)
    rows = []
    for step in range(STEPS):
        for micro in range(micros):
            for tokens, targets in zip(*(x.chunk(2) for x in batch(step, micro)), strict=True):
                (F.cross_entropy(net(tokens), targets) / (2 * micros)).backward()
        rows.append(plain.step())
    return rows, net.state_dict()
