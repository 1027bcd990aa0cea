"""A sparse variational Gaussian process or a last-layer Laplace approximation, run in an environment of their own.

python _torch_rivals.py rows.npz predictions.npz sparse_gp|last_layer seconds

Rows are standardised; seconds are of the processor, after which training stops.
"""

import math
import sys
import time

import gpytorch
import numpy as np
import torch

BATCH, INDUCING, WIDTH = 1024, 512, 128


def batches(x, y, seconds):
    """Yield minibatches and the share of the time that has passed, until none is left."""
    start, generator = time.process_time(), torch.Generator().manual_seed(0)
    while (share := (time.process_time() - start) / seconds) < 1:
        rows = torch.randint(len(x), (min(BATCH, len(x)),), generator=generator)
        yield x[rows], y[rows], share


def descend(parameters, loss, x, y, seconds, rate):
    """Descend by Adam, with a rate that falls to nothing like a cosine."""
    optimizer = torch.optim.Adam(parameters, lr=rate)
    for x_batch, y_batch, share in batches(x, y, seconds):
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * share)) / 2
        optimizer.zero_grad()
        loss(x_batch, y_batch).backward()
        optimizer.step()


class SparseGP(gpytorch.models.ApproximateGP):
    """Gaussian process of a Matern-5/2 kernel with a length for each column, by inducing points (Hensman 2013)."""

    def __init__(self, points):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=points.shape[1])
        )

    def forward(self, x):
        """Return the prior at some inputs."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def sparse_gp(x, y, x_new, seconds):
    """Return mean and variance of the function, and the variance of the noise."""
    model = SparseGP(x[torch.randperm(len(x))[:INDUCING]].clone())
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    parameters = [*model.parameters(), *likelihood.parameters()]
    descend(parameters, lambda x, y: -bound(model(x), y), x, y, seconds, 0.03)
    model.eval()
    with torch.no_grad():
        found = model(x_new)
        return found.mean, found.variance, likelihood.noise


def last_layer(x, y, x_new, seconds):
    """Return the same of a network trained by least squares, its last layer exact by the evidence (MacKay 1992)."""
    hidden = [torch.nn.Linear(x.shape[1], WIDTH), torch.nn.SiLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.SiLU()]
    body = torch.nn.Sequential(*hidden)
    network = torch.nn.Sequential(body, torch.nn.Linear(WIDTH, 1))
    descend(network.parameters(), lambda x, y: ((network(x)[:, 0] - y) ** 2).mean(), x, y, seconds, 3e-3)

    def features(x):
        return torch.cat([body(x).double(), torch.ones(len(x), 1).double()], 1)

    with torch.no_grad():
        gram, product = torch.zeros(WIDTH + 1, WIDTH + 1).double(), torch.zeros(WIDTH + 1).double()
        for start in range(0, len(x), 8192):
            phi = features(x[start : start + 8192])
            gram, product = gram + phi.T @ phi, product + phi.T @ y[start : start + 8192].double()
        values, vectors = torch.linalg.eigh(gram)
        values, rotated, squares = values.clamp(min=0), vectors.T @ product, y.double().square().sum()
        noise, prior = squares / len(x) / 10, torch.tensor(1.0).double()  # variances
        for _ in range(100):
            precisions = values / noise + 1 / prior
            mean = rotated / noise / precisions
            known = (values / noise / precisions).sum()
            noise = (squares - 2 * mean @ rotated + (values * mean**2).sum()) / (len(x) - known)
            prior = mean.square().sum() / known
        phi = features(x_new) @ vectors
        return phi @ mean, phi.square() @ (1 / precisions), noise


def main():
    """Fit and predict."""
    source, target, name, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = {key: torch.from_numpy(value.astype("f")) for key, value in np.load(source).items()}
    found = {"sparse_gp": sparse_gp, "last_layer": last_layer}[name](*rows.values(), float(seconds))
    names = ("mean", "variance", "noise_variance")
    np.savez(target, **{key: value.detach().numpy().astype(float) for key, value in zip(names, found, strict=True)})


if __name__ == "__main__":
    main()
