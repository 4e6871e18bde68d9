"""Training steps as public trainers write them, each compiled as it is."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.step.written import (
    Build,
    Written,
    classifier,
    compiled_beside_eager,
    cross_entropy,
    labelled,
    placed,
    seeded,
)

PROGRAMS: dict[str, Build] = {}
NUM_PROGRAMS = {"diffusion, an average by hand that assigns .data": 2}
"""How many programs a step is compiled to, if not to one: there, the average begins as a copy."""


def written(name: str) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        PROGRAMS[name] = build
        return build

    return add


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, **options)


@written("GAN, one backward for each loss")
def gan() -> Written:
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
    critic = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())
    placed(generator, critic)
    criterion = nn.BCELoss()
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))

    def step(real: torch.Tensor, _: Any) -> dict[str, Any]:
        critic.zero_grad()
        label = torch.full((real.size(0),), 1.0)
        output = critic(real).view(-1)
        loss_real = criterion(output, label)
        loss_real.backward()
        d_x = output.mean().item()
        fake = generator(torch.randn(real.size(0), 4))
        label.fill_(0.0)
        loss_fake = criterion(critic(fake.detach()).view(-1), label)
        loss_fake.backward()
        loss_d = loss_real + loss_fake
        optimizer_d.step()
        generator.zero_grad()
        label.fill_(1.0)
        loss_g = criterion(critic(fake).view(-1), label)
        loss_g.backward()
        optimizer_g.step()
        return {"d": loss_d.item(), "g": loss_g.item(), "d_x": d_x}

    return Written(step, [generator, critic], [optimizer_d, optimizer_g])


@written("WGAN-GP")
def penalty() -> Written:
    generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    placed(generator, critic)
    optimizer_d, optimizer_g = adamw(critic), adamw(generator)

    def gradient_penalty(real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        alpha = torch.rand(real.size(0), 1)
        between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        scores = critic(between)
        (grads,) = torch.autograd.grad(
            scores, between, torch.ones_like(scores), create_graph=True, retain_graph=True
        )
        return ((grads.norm(2, dim=1) - 1) ** 2).mean()

    def step(real: torch.Tensor, _: Any) -> tuple[float, float]:
        for p in critic.parameters():
            p.requires_grad = True
        for _ in range(2):
            optimizer_d.zero_grad()
            fake = generator(torch.randn(real.size(0), 4)).detach()
            loss_d = critic(fake).mean() - critic(real).mean() + 10 * gradient_penalty(real, fake)
            loss_d.backward()
            optimizer_d.step()
        for p in critic.parameters():
            p.requires_grad = False
        optimizer_g.zero_grad()
        loss_g = -critic(generator(torch.randn(real.size(0), 4))).mean()
        loss_g.backward()
        optimizer_g.step()
        return loss_d.item(), loss_g.item()

    return Written(step, [generator, critic], [optimizer_d, optimizer_g])


class Tiny(nn.Module):
    """A language model of 12 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def preferences(at: int) -> tuple[Any, ...]:
    ids = torch.randint(0, 12, (6, 5), generator=seeded(at))
    mask = torch.ones(6, 5)
    mask[:, :2] = 0
    return ({"ids": ids, "mask": mask},)


@written("DPO with a frozen reference model")
def dpo() -> Written:
    policy = Tiny()
    reference = copy.deepcopy(policy).eval()
    for p in reference.parameters():
        p.requires_grad_(False)
    placed(policy, reference)
    optimizer = adamw(policy)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: min(1.0, (at + 1) / 3))

    def log_probs(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits, labels = model(batch["ids"])[:, :-1], batch["ids"][:, 1:]
        each = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
        return (each * batch["mask"][:, 1:]).sum(-1)

    def step(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        policy.train()
        chosen, rejected = log_probs(policy, batch).chunk(2)
        with torch.no_grad():
            reference_chosen, reference_rejected = log_probs(reference, batch).chunk(2)
        logits = (chosen - rejected) - (reference_chosen - reference_rejected)
        loss = -F.logsigmoid(0.1 * logits).mean()
        rewards = 0.1 * (chosen - reference_chosen).detach(), 0.1 * (rejected - reference_rejected).detach()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        accuracy = (rewards[0] > rewards[1]).float().mean()
        return {"loss": loss.item(), "norm": norm, "accuracy": accuracy.cpu()}

    return Written(step, [policy, reference], [optimizer, schedule], batch=preferences)


@written("distillation with a frozen teacher")
def distillation() -> Written:
    teacher, student = classifier().eval().requires_grad_(False), nn.Linear(8, 4)
    placed(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor, temperature: float = 2.0) -> float:
        optimizer.zero_grad()
        with torch.no_grad():
            teacher_logits = teacher(x)
        student_logits = student(x)
        soft = F.kl_div(
            F.log_softmax(student_logits / temperature, -1),
            F.softmax(teacher_logits / temperature, -1),
            reduction="batchmean",
        )
        loss = 0.5 * F.cross_entropy(student_logits, y) + 0.5 * soft * temperature**2
        loss.backward()
        optimizer.step()
        return loss.item()

    return Written(step, [teacher, student], [optimizer])


def whole(param: torch.Tensor) -> torch.Tensor:
    """A parameter that each rank has, where tensor parallelism makes a distributed tensor of it."""
    return param.to_local() if isinstance(param, DTensor) else param


class MaskedAutoencoder(nn.Module):
    """He et al., 2022, of six patches."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 8), nn.Linear(8, 4)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, 8))

    def forward(self, patches: torch.Tensor, ratio: float = 0.5) -> torch.Tensor:
        n, length, _ = patches.shape
        keep = int(length * (1 - ratio))
        shuffle = torch.argsort(torch.rand(n, length, device=patches.device), dim=1)
        restore = torch.argsort(shuffle, dim=1)
        kept = torch.gather(patches, 1, shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, patches.size(2)))
        mask = torch.ones([n, length])
        mask[:, :keep] = 0
        mask = torch.gather(mask, 1, restore)
        latent = self.encoder(kept)
        tokens = torch.cat([latent, whole(self.mask_token).repeat(n, length - keep, 1)], dim=1)
        tokens = torch.gather(tokens, 1, restore.unsqueeze(-1).repeat(1, 1, tokens.size(2)))
        loss = ((self.decoder(tokens) - patches) ** 2).mean(-1)
        return (loss * mask).sum() / mask.sum()


@written("MAE, a learning rate by hand, micro-batches that count calls")
def mae() -> Written:
    model = MaskedAutoencoder()
    placed(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    calls = {"n": 0}

    def adjust_learning_rate(at: int) -> float:
        lr = 0.01 * at / 3 if at < 3 else 0.01 * 0.5 * (1 + math.cos(math.pi * (at - 3) / 7))
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr

    def step(patches: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(patches)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item()

    def patches(at: int) -> tuple[Any, ...]:
        return (torch.randn(3, 6, 4, generator=seeded(at)),)

    def between(at: int) -> None:
        calls["n"] += 1
        adjust_learning_rate(at + 1)

    return Written(step, [model], [optimizer, scaler], lambda: calls, patches, between)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.body = (
            nn.Embedding(20, 8),
            nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8)),
        )

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.body(x + self.time(t))


class EMA:
    """A copy that follows, with a decay that warms up."""

    def __init__(self, model: nn.Module, beta: float = 0.99) -> None:
        self.beta, self.step, self.copy = beta, 0, copy.deepcopy(model).eval().requires_grad_(False)

    def update(self, model: nn.Module) -> None:
        self.step += 1
        if self.step <= 2:
            self.copy.load_state_dict(model.state_dict())
            return
        for ours, theirs in zip(self.copy.parameters(), model.parameters(), strict=True):
            ours.data = ours.data * self.beta + theirs.data * (1 - self.beta)


def average_of(ema: Any) -> nn.Module:
    return ema.copy if isinstance(ema, EMA) else ema.module


class DiffusionTrainer:
    """DDPM (Ho et al., 2020) as a class, of which a method is compiled."""

    def __init__(self, averages: Callable[[nn.Module], Any]) -> None:
        self.model = Denoiser()
        self.ema = averages(self.model)
        placed(self.model, average_of(self.ema))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 20), 0)
        self.step, self.losses = 0, list[float]()

    def q_sample(self, x: torch.Tensor, t: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        a = self.alphas[t].unsqueeze(1)
        return a.sqrt() * x + (1 - a).sqrt() * noise

    def train_step(self, x: torch.Tensor, _: Any) -> torch.Tensor:
        t = torch.randint(0, 20, (x.shape[0],), device=x.device).long()
        noise = torch.randn_like(x)
        loss = F.mse_loss(self.model(self.q_sample(x, t, noise), t), noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad()
        self.step += 1
        self.losses.append(loss.item())
        self.update_average()
        return loss.detach()

    def update_average(self) -> None:
        (self.ema.update_parameters if hasattr(self.ema, "update_parameters") else self.ema.update)(
            self.model
        )


@written("diffusion, a method of a trainer, AveragedModel")
def diffusion() -> Written:
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    trainer = DiffusionTrainer(
        lambda model: torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    )
    return Written(
        trainer.train_step,
        [trainer.model, trainer.ema],
        [trainer.opt],
        lambda: (trainer.step, trainer.losses),
    )


@written("diffusion, an average by hand that assigns .data")
def diffusion_by_hand() -> Written:
    trainer = DiffusionTrainer(EMA)
    return Written(
        trainer.train_step,
        [trainer.model, trainer.ema.copy],
        [trainer.opt],
        lambda: (trainer.step, trainer.losses, trainer.ema.step),
    )


@written("PPO, epochs and minibatches inside")
def ppo() -> Written:
    policy, value = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)), nn.Linear(8, 1)
    placed(policy, value)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=0.01, eps=1e-5)

    def rollout(at: int) -> tuple[Any, ...]:
        g = seeded(at)
        acts = torch.randint(0, 4, (8,), generator=g)
        return (
            torch.randn(8, 8, generator=g),
            acts,
            -torch.rand(8, generator=g),
            *torch.randn(2, 8, generator=g),
        )

    def update(obs: Any, acts: Any, old: Any, advantages: Any, returns: Any) -> dict[str, float]:
        clip_fractions = []
        for _ in range(2):
            order = torch.randperm(8)
            for start in range(0, 8, 4):
                at = order[start : start + 4]
                dist = torch.distributions.Categorical(logits=policy(obs[at]))
                log_ratio = dist.log_prob(acts[at]) - old[at]
                ratio = log_ratio.exp()
                with torch.no_grad():
                    approx_kl = ((ratio - 1) - log_ratio).mean()
                    clip_fractions += [((ratio - 1.0).abs() > 0.2).float().mean().item()]
                adv = advantages[at]
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
                v_loss = 0.5 * ((value(obs[at]).view(-1) - returns[at]) ** 2).mean()
                loss = pg_loss - 0.01 * dist.entropy().mean() + v_loss * 0.5
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_([*policy.parameters(), *value.parameters()], 0.5)
                optimizer.step()
        return {"loss": loss.item(), "kl": approx_kl.item(), "clipped": sum(clip_fractions) / 4}

    return Written(update, [policy, value], [optimizer], batch=rollout)


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(0.1)
        self.lora_a = nn.Linear(base.in_features, 2, bias=False)
        self.lora_b = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(self.dropout(x))) * 2.0


@written("LoRA, micro-batches in a list")
def lora() -> Written:
    model = nn.Sequential(Adapted(nn.Linear(8, 12)), nn.GELU(), Adapted(nn.Linear(12, 4)))
    placed(model)
    optimizer = adamw(model)

    def step(batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        total = torch.zeros(())
        for batch in batches:
            loss = cross_entropy(model, batch["x"], batch["y"]) / len(batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    def batches(at: int) -> tuple[Any, ...]:
        return ([dict(zip("xy", labelled(3 * at + one), strict=True)) for one in range(3)],)

    return Written(step, [model], [optimizer], batch=batches)


@written("QAT, observers that move")
def qat() -> Written:
    from torch.ao.quantization import DeQuantStub, QuantStub, get_default_qat_qconfig, prepare_qat

    model = nn.Sequential(QuantStub(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4), DeQuantStub()).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own use of what it deprecates
        model.qconfig = get_default_qat_qconfig("fbgemm")
        model = prepare_qat(model)
    placed(model)
    optimizer = adamw(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Written(step, [model], [optimizer])


@written("QAT, torchao")
def qat_torchao() -> Written:
    from torchao.quantization.qat import FakeQuantizedLinear, IntxFakeQuantizeConfig

    def layer(a: int, b: int) -> nn.Module:
        return FakeQuantizedLinear(
            a,
            b,
            False,
            IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
            IntxFakeQuantizeConfig(torch.int4, group_size=4),
        )

    model = nn.Sequential(layer(8, 12), nn.ReLU(), layer(12, 4))
    placed(model)
    optimizer = adamw(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Written(step, [model], [optimizer])


@written("Muon and AdamW, in a list")
def muon() -> Written:
    model = classifier()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01, fused=True)]
    for opt in optimizers:
        for group in opt.param_groups:
            group["initial_lr"] = group["lr"]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for micro in range(2):
            (cross_entropy(model, x[micro::2], y[micro::2]) / 2).backward()
        for opt in optimizers:
            opt.step()
        model.zero_grad(set_to_none=True)
        return model(x).detach()

    def between(at: int) -> None:
        for opt in optimizers:
            for group in opt.param_groups:
                group["lr"] = group["initial_lr"] * (1 - at / 10)
        for group in optimizers[0].param_groups:
            group["momentum"] = (1 - at / 10) * 0.85 + at / 10 * 0.95

    return Written(step, [model], optimizers, between=between)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al., 2021), around another optimizer."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def _grad_norm(self) -> torch.Tensor:
        norms = [p.grad.norm(p=2) for g in self.param_groups for p in g["params"] if p.grad is not None]
        return torch.norm(torch.stack(norms), p=2)


@written("SAM, a class around another optimizer")
def sam() -> Written:
    model = classifier()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        cross_entropy(model, x, y).backward()
        optimizer.second_step(zero_grad=True)
        return loss.item()

    return Written(step, [model], [optimizer, optimizer.base_optimizer])


@written("SAM by hand")
def sam_by_hand() -> Written:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = cross_entropy(model, x, y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = []
            for p in model.parameters():
                moves.append(p.grad * (0.05 / (norm + 1e-12)))
                p.add_(moves[-1])
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Written(step, [model], [optimizer])


class Queued(nn.Module):
    """MoCo (He et al., 2020): keys by an encoder that follows, and a queue of the last ones."""

    queue: torch.Tensor
    position: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (
            nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4)) for _ in range(2)
        )
        for ours, theirs in zip(self.query.parameters(), self.key.parameters(), strict=True):
            theirs.data.copy_(ours.data)
            theirs.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(4, 12), dim=0))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        at: Any = self.position.item()
        self.queue[:, at : at + len(keys)] = keys.T
        self.position[0] = (at + len(keys)) % 12

    def forward(self, images: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        queries = F.normalize(self.query(images), dim=1)
        with torch.no_grad():
            for ours, theirs in zip(self.query.parameters(), self.key.parameters(), strict=True):
                theirs.data = theirs.data * 0.9 + ours.data * 0.1
            order = torch.randperm(len(others))
            keys = F.normalize(self.key(others[order]), dim=1)[torch.argsort(order)]
        same = torch.einsum("nc,nc->n", queries, keys).unsqueeze(-1)
        others = torch.einsum("nc,ck->nk", queries, self.queue.clone().detach())
        self.enqueue(keys)
        return torch.cat([same, others], dim=1) / 0.07


@written("MoCo, a queue that is written in place")
def moco() -> Written:
    model = Queued()
    placed(model)
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)

    def step(x: torch.Tensor, _: Any) -> float:
        loss = F.cross_entropy(model(x, x.flip(1)), torch.zeros(len(x), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Written(step, [model], [optimizer])


class Centred(nn.Module):
    """DINO's loss (Caron et al., 2021): each view of the student beside the teacher's other ones."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 10))

    def forward(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        total, terms = torch.zeros(()), 0
        targets = F.softmax((teacher - self.center) / 0.04, -1).detach().chunk(2)
        for at, target in enumerate(targets):
            for view, logits in enumerate((student / 0.1).chunk(4)):
                if view != at:
                    total = total + torch.sum(-target * F.log_softmax(logits, -1), -1).mean()
                    terms += 1
        with torch.no_grad():
            self.center = self.center * 0.9 + teacher.mean(0, keepdim=True) * 0.1
        return total / terms


def projection() -> nn.Module:
    last = nn.utils.parametrizations.weight_norm(nn.Linear(6, 10, bias=False))
    last.parametrizations.weight.original0.requires_grad = False
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 6), last)


@written("DINO, views in a list, a momentum that changes")
def dino() -> Written:
    student, teacher, criterion = projection(), projection(), Centred()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    placed(student, teacher)
    optimizer = adamw(student)

    def step(views: list[torch.Tensor], momentum: float) -> float:
        loss = criterion(student(torch.cat(views)), teacher(torch.cat(views[:2])))
        optimizer.zero_grad()
        loss.backward()
        for param in student.parameters():
            if param.grad is not None:
                norm = param.grad.data.norm(2)
                param.grad.data.mul_(torch.clamp(0.3 / (norm + 1e-6), max=1.0))
        student[0].bias.grad = None  # as the last layer's in the first epoch
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(student.parameters(), teacher.parameters(), strict=True):
                theirs.data.mul_(momentum).add_((1 - momentum) * ours.detach().data)
        return loss.item()

    def views(at: int) -> tuple[Any, ...]:
        generator = seeded(at)
        return [torch.randn(3, 8, generator=generator) for _ in range(4)], 0.9 + at / 200

    def between(at: int) -> None:
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.01 * (at + 1) / 10, 0.04 + 0.01 * at

    return Written(step, [student, teacher, criterion], [optimizer], batch=views, between=between)


NUM_PROGRAMS["DINO, views in a list, a momentum that changes"] = 2


class Codebook(nn.Module):
    """VQ-VAE-2's (Razavi et al., 2019): an average of what falls to each code."""

    codes: torch.Tensor
    sizes: torch.Tensor
    sums: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 6))
        self.register_buffer("sizes", torch.zeros(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distance = x.pow(2).sum(1, keepdim=True) - 2 * x @ self.codes + self.codes.pow(2).sum(0, keepdim=True)
        nearest = (-distance).max(1)[1]
        one_hot = F.one_hot(nearest, 6).type(x.dtype)
        quantised = F.embedding(nearest, self.codes.transpose(0, 1))
        if self.training:
            self.sizes.data.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
            self.sums.data.mul_(0.9).add_(x.transpose(0, 1) @ one_hot, alpha=0.1)
            total = self.sizes.sum()
            sizes = (self.sizes + 1e-5) / (total + 6e-5) * total
            self.codes.data.copy_(self.sums / sizes.unsqueeze(0))
        return x + (quantised - x).detach(), (quantised.detach() - x).pow(2).mean()


@written("VQ-VAE, a codebook in buffers")
def vq_vae() -> Written:
    encoder, codebook, decoder = nn.Linear(8, 4), Codebook(), nn.Linear(4, 8)
    placed(encoder, decoder)
    model = nn.ModuleList([encoder, codebook, decoder])
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)

    def step(x: torch.Tensor, _: Any) -> tuple[float, float]:
        model.zero_grad()
        quantised, distance = codebook(encoder(x))
        loss = F.mse_loss(decoder(quantised), x) + 0.25 * distance
        loss.backward()
        optimizer.step()
        return loss.item(), distance.item()

    return Written(step, [model], [optimizer])


@written("MAML, by functional_call")
def maml() -> Written:
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        losses = []
        for at in range(0, 4, 2):
            fast: Any = dict(model.named_parameters())
            for _ in range(2):
                logits = torch.func.functional_call(model, fast, (x[at : at + 2],))
                loss = F.cross_entropy(logits, y[at : at + 2])
                grads = torch.autograd.grad(loss, fast.values(), create_graph=True)
                pairs = zip(fast.items(), grads, strict=True)
                fast = {name: param - 0.1 * grad for (name, param), grad in pairs}
            losses.append(F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y))
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Written(step, [model], [optimizer])


class Mixture(nn.Module):
    """Each token to two of four experts, and a loss that spreads them (Fedus et al., 2021)."""

    load: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("load", torch.zeros(4))
        self.auxiliary = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = F.softmax(self.gate(x), -1)
        weights, chosen = torch.topk(scores, 2, -1)
        mask, out = F.one_hot(chosen, 4).permute(2, 1, 0), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rank, token = torch.where(mask[number])
            out.index_add_(0, token, expert(x[token]) * weights[token, rank, None])
        share = mask.float().mean(dim=(1, 2))
        self.auxiliary = 4 * (share * scores.mean(0)).sum()
        with torch.no_grad():
            self.load.lerp_(share, 0.1)
        return out


@written("a mixture of experts, with a loss of its router's")
def mixture() -> Written:
    model = nn.Sequential(Mixture(), Mixture(), nn.Linear(8, 4))
    placed(model)
    optimizer = adamw(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model, x, y) + 0.01 * sum(layer.auxiliary for layer in model[:2])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Written(step, [model], [optimizer])


@written("word2vec, bags of contexts, negative samples")
def word2vec() -> Written:
    contexts, words = nn.EmbeddingBag(30, 8, mode="mean"), nn.Embedding(30, 8)
    placed(contexts, words)
    model = nn.ModuleList([contexts, words])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(context: Any, offsets: Any, target: Any, negative: Any) -> float:
        hidden = contexts(context, offsets)
        right = F.logsigmoid((hidden * words(target)).sum(-1))
        wrong = F.logsigmoid(-torch.bmm(words(negative), hidden.unsqueeze(2)).squeeze(2)).sum(1)
        loss = -(right + wrong).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def batch(at: int) -> tuple[Any, ...]:
        context, target, negative = (
            torch.randint(0, 30, size, generator=seeded(at)) for size in ((20,), (5,), (5, 3))
        )
        return context, torch.arange(0, 20, 4), target, negative

    return Written(step, [model], [optimizer], batch=batch)


class Node2Vec(nn.Module):
    """PyTorch Geometric's: walks from a node, and walks to nodes that are none of its neighbours."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_nodes, 8, sparse=True)

    def loss(self, pos_rw: torch.Tensor, neg_rw: torch.Tensor) -> torch.Tensor:
        eps, losses = 1e-15, []
        for walk, sign in ((pos_rw, 1), (neg_rw, -1)):
            start, rest = walk[:, 0], walk[:, 1:].contiguous()
            h_start = self.embedding(start).view(walk.size(0), 1, 8)
            h_rest = self.embedding(rest.view(-1)).view(walk.size(0), -1, 8)
            out = torch.sigmoid((h_start * h_rest).sum(dim=-1).view(-1))
            losses.append(-torch.log((out if sign > 0 else 1 - out) + eps).mean())
        return losses[0] + losses[1]


@written("node2vec, sparse gradients")
def node2vec() -> Written:
    model = Node2Vec(20)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.01)

    def train(pos_rw: torch.Tensor, neg_rw: torch.Tensor) -> float:
        model.train()
        optimizer.zero_grad()
        loss = model.loss(pos_rw, neg_rw)
        loss.backward()
        optimizer.step()
        return loss.item()

    def walks(at: int) -> tuple[Any, ...]:
        return tuple(torch.randint(0, 20, (6, 4), generator=seeded(at + seed)) for seed in (0, 100))

    return Written(train, [model], [optimizer], batch=walks)


class Recommender(nn.Module):
    """Factors and biases of users and items, and a head: a sparse and a dense optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = (nn.Embedding(15, 6, sparse=True) for _ in range(2))
        self.biases = nn.Embedding(15, 1, sparse=True)
        self.head = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        pair = self.users(user), self.items(item)
        rating = self.head(torch.cat(pair, -1)) + self.biases(user) + self.biases(item)
        return (rating + (pair[0] * pair[1]).sum(-1, keepdim=True)).squeeze(-1)


@written("recommender, sparse and dense gradients")
def recommender() -> Written:
    model = Recommender()
    sparse = [p for name, p in model.named_parameters() if not name.startswith("head")]
    optimizers = torch.optim.SparseAdam(sparse, lr=0.02), adamw(model.head)

    def step(user: torch.Tensor, item: torch.Tensor, rating: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(user, item), rating)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    def ratings(at: int) -> tuple[Any, ...]:
        pair = (torch.randint(0, 15, (8,), generator=seeded(at + seed)) for seed in (0, 100))
        return (*pair, torch.rand(8, generator=seeded(at)))

    return Written(step, [model], optimizers, batch=ratings)


def _huggingface(kind: str) -> Build:
    def build() -> Written:
        import transformers

        sizes = {
            "Llama": dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2),
            "GPT2": dict(n_embd=16, n_layer=1, n_head=2, n_positions=16),
            "T5": dict(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0),
        }[kind]
        config = getattr(transformers, f"{kind}Config")(vocab_size=32, pad_token_id=0, **sizes)
        suffix = {"Llama": "ForCausalLM", "GPT2": "LMHeadModel", "T5": "ForConditionalGeneration"}[kind]
        model = getattr(transformers, kind + suffix)(config).train()
        placed(model)
        decay = [p for p in model.parameters() if p.ndim > 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": 0.1},
                {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 10)

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            model.train()
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            return loss.detach().float()

        def tokens(at: int) -> tuple[Any, ...]:
            ids = torch.randint(1, 32, (2, 6), generator=seeded(at))
            return ({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids},)

        return Written(step, [model], [optimizer, schedule], batch=tokens)

    return build


for _kind in ("Llama", "GPT2", "T5"):
    PROGRAMS[_kind] = _huggingface(_kind)


@pytest.mark.parametrize("name", PROGRAMS)
def test_trainers(name: str) -> None:
    compiled = compiled_beside_eager(PROGRAMS[name])
    assert len(compiled.graphs) == NUM_PROGRAMS.get(name, 1)


@pytest.mark.slow
def test_a_queue_by_inductor() -> None:
    """It is written at a position that is read off a tensor."""
    compiled_beside_eager(moco, num_steps=4, backend="inductor")


def test_observers_that_ask_for_ranges_are_refused() -> None:
    """`FakeQuantize` asks whether computed ranges are valid; the fused one, the default, does not."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    model = nn.Sequential(nn.Linear(8, 4), FakeQuantize(MovingAverageMinMaxObserver, dtype=torch.quint8))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        cross_entropy(model, x, y).backward()

    compiled = aotdist.compile(step, backend="fx")
    with pytest.raises(UnsupportedProgram, match="reads a tensor's data"):
        for at in range(2):
            compiled(*labelled(at))
