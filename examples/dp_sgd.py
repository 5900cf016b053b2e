"""Training in which no single example counts for much, on the device itself: see docs/privacy.md.

    w <- w - eta g,    g = (1 / B) (sum over the batch of clip_C(g_i) + Z),    Z ~ N(0, (z C)^2 I)

| symbol | meaning                                            | here                                     |
|--------|----------------------------------------------------|------------------------------------------|
| g_i    | the gradient of one example                        | `torch.func`, over the whole model       |
| C      | the longest that one counts                        | `clip`                                   |
| z      | noise, in clips                                    | `noise`                                  |
| B      | examples of a batch, on average                    | `client.batch_size`                      |
| q      | an example's chance to be in a batch               | B / how many examples there are          |
| delta  | with what chance more than epsilon may be told     | `delta`                                  |

DP-SGD, Abadi et al. 2016 (arXiv 1607.00133). Opacus draws the batches, cuts, adds the noise and counts what
it comes to. Its own gradients of examples are made layer by layer, for the layers that it knows; those of
`torch.func` go through adapters and subspaces too.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import numpy as np
import torch
from opacus.accountants import PRVAccountant
from opacus.optimizers import DPOptimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from opacus.validators import ModuleValidator
from torch.func import functional_call, grad, vmap

from anabranch.workloads.app import App
from anabranch.workloads.batches import each_step, planned_steps
from anabranch.workloads.digits import Digits
from anabranch.workloads.objective import Objective

TWISTER = slice(24, 24 + 8 * 624)  # its words, of 32 bits each, in the bytes of a generator's state


class PrivateTraining(App):
    """Before another App's name among a class's bases: `class Mine(PrivateTraining, Yours)`."""

    clip = 1.0
    noise = 1.0
    delta = 1e-5

    def train(self, model: Any, examples: Any, plan: Any, seed: int) -> dict[str, float]:
        """The plan's steps. Metrics: `steps`, and `epsilon` of all that this device has trained in the run.

        No loss: that would tell of examples without noise. `seed` is the server's, so nothing is drawn by it.
        """
        del seed
        model.train()
        ModuleValidator.validate(model, strict=True)  # refuses what mixes examples, such as batch norm
        count, steps = len(examples), planned_steps(plan, len(examples))
        rate = min(1.0, plan.batch_size / count)
        objective, trained = (
            Objective.of(self),
            {n: p for n, p in model.named_parameters() if p.requires_grad},
        )
        params = list(trained.values())
        optimizer = DPOptimizer(
            objective.make_optimizer(params, plan),
            noise_multiplier=self.noise,
            max_grad_norm=self.clip,
            expected_batch_size=rate * count,
            generator=_drawing(self.runtime.device),
            secure_mode=True,  # sums of several draws: their last bits tell nothing of what they hide
        )
        accountant = PRVAccountant()
        accountant.history = [tuple(part) for part in json.loads(self.kept or b"[]")]
        optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(rate))
        batches = UniformWithReplacementSampler(
            num_samples=count, sample_rate=rate, generator=_drawing("cpu"), steps=steps
        )
        for rows in batches:
            each_step()
            x, y = self.runtime.batch(examples, np.array(rows, np.int64), params[0].dtype)
            found = _gradients(model, objective, trained, x, y)
            for name, param in trained.items():
                param.grad_sample, param.summed_grad = found[name], None
            optimizer.step()
        for param in params:
            param.grad = param.grad_sample = param.summed_grad = None
        # It counts with the update that it belongs to, whatever becomes of that.
        self.kept = json.dumps(accountant.history).encode()
        return {"steps": float(steps), "epsilon": self.epsilon(accountant)}

    def epsilon(self, accountant: PRVAccountant) -> float:
        """Of all that an accountant has counted."""
        return float(accountant.get_epsilon(self.delta))


def _gradients(
    model: Any, objective: Objective, trained: dict[str, Any], x: torch.Tensor, y: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Of each example, by parameter: (batch, ...)."""
    if not len(y):
        return {name: param.new_zeros(0, *param.shape) for name, param in trained.items()}

    def loss(values: dict[str, Any], one: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return objective.batch_loss(functional_call(model, values, (one[None],)), label[None])

    values = {name: param.detach() for name, param in trained.items()}
    found: dict[str, torch.Tensor] = vmap(grad(loss), (None, 0, 0), randomness="different")(values, x, y)
    return found


def _drawing(device: Any) -> torch.Generator:
    """Draws that nobody can repeat: the server knows every seed of the run.

    On the CPU they are a Mersenne Twister's, of whose seed torch takes 32 bits: few enough to try them all.
    So all of its words are drawn. A GPU's generator takes the seed whole.
    """
    generator = torch.Generator(device).manual_seed(secrets.randbits(63))
    if generator.device.type == "cpu":
        state = generator.get_state()
        words = state[TWISTER].view(torch.int64)
        words.copy_(torch.from_numpy(np.frombuffer(secrets.token_bytes(4 * len(words)), np.uint32).copy()))
        generator.set_state(state)
    return generator


class PrivateDigits(PrivateTraining, Digits):
    """The digits, so that no image of a device counts for much."""
