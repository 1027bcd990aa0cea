"""An infinitely wide network as a model of BoTorch: fitted in JAX, asked and differentiated from PyTorch.

`WideLimit(train_X, train_Y, capacity)` compares the limits of a dense and an additive network by their evidence, at
the mode of all scales. BoTorch's acquisition functions take its `posterior(X)`, and `optimize_acqf` its gradients.
Rows are filled up to `capacity`, and points are asked for sixteen at a time, so that a whole study is one program for
each network. Inputs lie in the unit cube.

    pip install '.[botorch]'
    python examples/botorch_surrogate.py --rounds 30
"""

import argparse
import time
import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.exceptions import InputDataWarning
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.posteriors import GPyTorchPosterior
from botorch.test_functions import Hartmann
from gpytorch.distributions import MultivariateNormal

from numpyro_wide import wide_limit
from numpyro_wide.nn import FCN, AdditiveNetwork

NOISE = 0.01  # of standardised targets: functions are measured without noise
AT_ONCE = 16  # points of a call of the compiled program
JITTER = 1e-8  # of the prior variance, that BoTorch may factorise covariances


def standardised(points):
    """Return points of the unit cube as the additive network's law has them, with mean 0 and variance 1."""
    return (2 * points - 1) * 3**0.5


@cache
def programs(network):
    """Return the posterior's moments as a function of points (b, q, d), and their pullback, compiled."""

    def moments(points, scales, inputs, root, targets, is_row):
        kernel = wide_limit.kernel(network.clone(**scales))

        def at(points):
            points = standardised(points)
            cross = jnp.where(is_row, kernel.nngp(points, inputs), 0.0)
            white = jax.scipy.linalg.solve_triangular(root, cross.T, lower=True)
            prior = kernel.nngp(points)
            covariance = prior - white.T @ white + JITTER * jnp.trace(prior) * jnp.eye(len(points)) / len(points)
            return white.T @ targets, covariance

        return jax.vmap(at)(points)

    def pull_back(points, mean, covariance, *given):
        return jax.vjp(lambda points: moments(points, *given), points)[1]((mean, covariance))

    return jax.jit(moments), jax.jit(pull_back)


class Moments(torch.autograd.Function):
    """Mean (b, q) and covariance (b, q, q) of a model at points (b, q, d), with their gradient."""

    @staticmethod
    def forward(ctx, points, model):
        """Compute both by JAX."""
        ctx.save_for_backward(points)
        ctx.model = model
        mean, covariance = model.by_blocks(model.moments, points.numpy())
        return torch.from_numpy(mean), torch.from_numpy(covariance)

    @staticmethod
    def backward(ctx, mean, covariance):
        """Pull slopes back to the points."""
        (points,) = ctx.saved_tensors
        (slope,) = ctx.model.by_blocks(ctx.model.pull_back, points.numpy(), mean.numpy(), covariance.numpy())
        return torch.from_numpy(slope), None


class WideLimit(Model):
    """Posterior of an infinitely wide network, as a `SingleTaskGP`.

    Args:
        train_X: inputs in the unit cube, (n, d), in double precision.
        train_Y: targets, (n, 1).
        capacity: number of rows to fill up to, the same in all rounds.
    """

    num_outputs = 1

    def __init__(self, train_X, train_Y, capacity):
        super().__init__()
        x, y = standardised(train_X.numpy()), train_Y.numpy()[:, 0]
        self.shift, self.size = y.mean(), y.std() or 1.0
        dense = FCN(depth=1, width=1, activation="erf")
        additive = AdditiveNetwork(order=min(2, x.shape[1]), width=1, law="uniform")
        forms = (dense, {"input_scale": True}), (additive, {"network": additive})
        y = (y - self.shift) / self.size
        options = {"noise_scale": NOISE, "num_restarts": 1, "progress_bar": False}
        with warnings.catch_warnings(action="ignore"):  # of copied rows and far ones, which a search has
            fits = [wide_limit.fit(x, y, **form, **options) for _, form in forms]
        best = int(np.argmax([fit.table[0]["log_marginal"] for fit in fits]))
        self.fit, (self.moments, self.pull_back) = fits[best], programs(forms[best][0])
        # The Cholesky factor of the covariance of the rows, once for all points, and targets whitened by it.
        root, padding = np.eye(capacity), capacity - len(x)
        root[: len(x), : len(x)] = np.linalg.cholesky(self.fit.nngp(x) + NOISE**2 * np.eye(len(x)))
        whitened = np.linalg.solve(root, np.pad(y, (0, padding)))
        rows = np.pad(x, ((0, padding), (0, 0))), root, whitened, np.arange(capacity) < len(x)
        self.given = jax.tree.map(np.asarray, (self.fit.scales, *rows))

    def by_blocks(self, program, *arrays):
        """Run a program on some points, and what belongs to them, at a time."""
        blocks = []
        with jax.enable_x64(True):
            for start in range(0, len(arrays[0]), AT_ONCE):
                block = [array[start : start + AT_ONCE] for array in arrays]
                filled = [np.resize(array, (AT_ONCE, *array.shape[1:])) for array in block]
                blocks.append([np.array(result)[: len(block[0])] for result in program(*filled, *self.given)])
        return [np.concatenate(results) for results in zip(*blocks, strict=True)]

    def posterior(self, X, output_indices=None, observation_noise=False, posterior_transform=None):
        """Return the posterior at points (..., q, d)."""
        mean, covariance = Moments.apply(X.reshape(-1, *X.shape[-2:]), self)
        if observation_noise:
            covariance = covariance + self.fit.noise_scale**2 * torch.eye(covariance.shape[-1])
        mean, covariance = self.shift + self.size * mean, self.size**2 * covariance
        moments = (moment.reshape(*X.shape[:-2], *moment.shape[1:]) for moment in (mean, covariance))
        posterior = GPyTorchPosterior(MultivariateNormal(*moments))
        return posterior if posterior_transform is None else posterior_transform(posterior)


def minimise(function, x, num_rounds, make_model):
    """Return all points and values of a search by expected improvement, from points (n, d), and its seconds a round."""
    y, start = function(x)[:, None], time.process_time()
    bounds = torch.stack([torch.zeros(x.shape[1]), torch.ones(x.shape[1])]).to(x)
    for _ in range(num_rounds):
        acquisition = LogExpectedImprovement(make_model(x, y), best_f=y.min(), maximize=False)
        point, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=128)
        x, y = torch.cat([x, point]), torch.cat([y, function(point)[:, None]])
    return x, y, (time.process_time() - start) / num_rounds


def main():
    """Minimise Hartmann's function of six inputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    num_rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore", InputDataWarning)
    torch.manual_seed(0)
    function = Hartmann(dim=6)
    x = torch.quasirandom.SobolEngine(6, scramble=True, seed=0).draw(14, dtype=torch.double)
    _, y, seconds = minimise(function, x, num_rounds, lambda x, y: WideLimit(x, y, 14 + num_rounds))
    print(f"least value {y.min():.4f}, of the first points {y[:14].min():.4f}, minimum {function.optimal_value:.4f}")
    print(f"{seconds:.1f} core seconds a round")


if __name__ == "__main__":
    main()
