"""Ensembles of microcanonical chains of sklearn-contrib-bde, run in an environment of their own by studies/duel.py.

python _bde.py rows.npz predictions.npz seed members steps
"""

import os
import sys

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={os.cpu_count()}"

import numpy as np
from bde import BdeRegressor
from bde.loss import GaussianNLL

source, target = sys.argv[1:3]
seed, members, steps = map(int, sys.argv[3:])
rows = np.load(source)
# Settings of its authors' benchmark; its chains take 50,000 steps of warmup there, and then 1000 of which 100 are kept.
model = BdeRegressor(
    n_members=members,
    hidden_layers=[16] * 4,
    loss=GaussianNLL(),
    epochs=1200,
    validation_split=0.15,
    lr=1e-3,
    weight_decay=1e-4,
    warmup_steps=steps,
    n_samples=1000,
    n_thinning=10,
    patience=20,
    seed=seed,
)
model.fit(rows["x"], rows["y"])
raw = np.asarray(model.predict(rows["x_test"], raw=True))  # (members, draws, m, 2): means and spreads before softplus
np.savez(target, raw=raw)
