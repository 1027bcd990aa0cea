"""Long runs in pieces, each written to disk as it is done, that go on where they were stopped."""

import copy
import json
import operator
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
from tqdm.auto import tqdm

from numpyro_wide import _checkpoint
from numpyro_wide._checks import check_key, whole_number
from numpyro_wide._digests import digest, program_digest
from numpyro_wide._programs import partition
from numpyro_wide.mcmc._stored_draws import STATE, StoredDraws, Writer


def run_in_pieces(
    mcmc: MCMC,
    folder: str | os.PathLike,
    rng_key: jax.Array,
    *model_args: Any,
    num_samples: int,
    extra_fields: tuple[str, ...] = (),
    init_params: Any = None,
    progress_bar: bool = True,
    **model_kwargs: Any,
) -> StoredDraws:
    """Run NumPyro's ``MCMC``, with any kernel, for longer than memory or patience would allow.

    ``mcmc.num_samples`` draws at a time are written to ``folder``, with the state after them: memory does not grow with
    the number of draws. A process that is killed, at whatever moment, loses the piece that it was at; called again with
    the same arguments, this goes on from there, and ends with the same draws, bit for bit, as a run that was never
    stopped. Warmup is done once, and its end is the first state that is written. Called with a larger ``num_samples``,
    a finished run goes on.

    Args:
        mcmc: its ``num_samples`` is the size of a piece, and its warmup, chains and chain method those of the run.
        folder: of this run alone.
        rng_key: a PRNG key.
        *model_args: as ``MCMC.run`` takes them.
        num_samples: draws of each chain in all, a multiple of the piece's size; before thinning, as NumPyro counts.
            Where there are more already, they stay.
        extra_fields: likewise; fields that are arrays.
        init_params: likewise.
        progress_bar: whether to show a bar over the whole.
        **model_kwargs: as ``model_args``.

    Returns:
        The draws, memory-mapped, to be read as an ``MCMC`` after its run.

    Raises:
        TypeError: if ``mcmc`` is no ``MCMC``, ``rng_key`` no PRNG key, or an extra field no array.
        ValueError: if ``num_samples`` is no multiple of the piece's size, the positions are no dictionary of sites, or
            the folder holds a run of another model, kernel, key or data.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, tempfile, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_wide.mcmc import run_in_pieces
        >>> def model(y=None):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("rows", 3):
        ...         numpyro.sample("y", dist.Normal(mean, 1), obs=y)
        >>> mcmc = MCMC(NUTS(model), num_warmup=50, num_samples=20, progress_bar=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draws = run_in_pieces(mcmc, folder, jax.random.key(0), y=jnp.ones(3), num_samples=60)
        ...     draws.get_samples()["mean"].shape
        (60,)
    """
    if not isinstance(mcmc, MCMC):
        raise TypeError(f"mcmc must be a numpyro.infer.MCMC, but is a {type(mcmc).__name__}.")
    check_key("rng_key", rng_key, "run_in_pieces(mcmc, folder, rng_key, x, y, num_samples=...)")
    whole_number("num_samples", num_samples)
    piece = mcmc.num_samples // mcmc.thinning
    if num_samples % mcmc.num_samples or mcmc.num_samples % mcmc.thinning:
        raise ValueError(
            f"num_samples must be a multiple of the piece's size, mcmc.num_samples={mcmc.num_samples}, and that one of "
            f"thinning={mcmc.thinning}, but is {num_samples}."
        )
    folder, total = Path(folder), num_samples // mcmc.thinning
    writer = Writer(folder, total)
    run = _Run(mcmc, folder / STATE, rng_key, model_args, model_kwargs, extra_fields, init_params)
    with tqdm(total=total, desc="sample", disable=not progress_bar) as bar:
        done = run.resume()
        if done < total and (total - done) % piece:
            raise ValueError(
                f"there are {done} draws in {folder}, and pieces of {piece} do not lead from there to {total}; choose "
                "mcmc.num_samples and num_samples so that they do."
            )
        bar.update(min(done, total))
        while done < total:
            writer.write(done, run.next_piece())
            done += piece
            run.save(done)
            bar.update(piece)
    mcmc.post_warmup_state = None  # or its next run, of other data say, would be without warmup
    return StoredDraws(folder, mcmc.sampler)


class _Run:
    """A run, and the file of its latest state."""

    def __init__(
        self,
        mcmc: MCMC,
        path: Path,
        rng_key: jax.Array,
        args: tuple,
        kwargs: dict[str, Any],
        extra_fields: tuple[str, ...],
        init_params: Any,
    ):
        self.mcmc, self.path, self.rng_key = mcmc, path, rng_key
        self.args, self.kwargs = args, kwargs
        self.extra_fields, self.init_params = tuple(extra_fields), init_params
        self.state: Any = None
        self.fingerprint = ""
        # NumPyro's kernels may be initialised once for vectorised chains, and MCMC does that to its own.
        self.sampler = copy.deepcopy(mcmc.sampler)

    def resume(self) -> int:
        """Take up the latest state, or warm up; the number of draws that there are."""
        state = self._first_state()
        self.fingerprint = self._fingerprint(state)
        if not self.path.exists():
            self.mcmc.warmup(
                self.rng_key, *self.args, extra_fields=self.extra_fields, init_params=self.init_params, **self.kwargs
            )
            self.state = self.mcmc.last_state
            self.save(0)
            return 0
        stored = _checkpoint.read(self.path)
        _refuse_other_runs(self.path, str(stored["['run']"]), self.fingerprint)
        record = _checkpoint.restore(self.path, stored, self._record(state, 0))
        self.state = record["state"]
        return int(record["num_samples"])

    def save(self, done: int) -> None:
        _checkpoint.save(self.path, self._record(self.state, done))

    def _record(self, state: Any, done: int) -> dict[str, Any]:
        return {"run": self.fingerprint, "num_samples": np.asarray(done, np.int64), "state": state}

    def next_piece(self) -> dict[str, dict[str, Any]]:
        """Draws (chains, draws, ...) by site, and extra fields."""
        mcmc, shown = self.mcmc, self.mcmc.progress_bar
        mcmc.post_warmup_state, mcmc.progress_bar = self.state, False
        try:
            # A kernel with a potential function asks for a position before it looks at the state.
            options = {"extra_fields": self.extra_fields, "init_params": self.init_params}
            mcmc.run(self.state.rng_key, *self.args, **options, **self.kwargs)
        finally:
            mcmc.progress_bar = shown
        self.state = mcmc.last_state
        samples, fields = mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields(group_by_chain=True)
        return {"samples": samples, "extra_fields": fields}

    def _first_state(self) -> Any:
        """A state like those of the run."""
        mcmc, sampler = self.mcmc, self.sampler
        is_single, is_vectorised = mcmc.num_chains == 1, mcmc.chain_method == "vectorized"
        keys = self.rng_key if is_single else jax.random.split(self.rng_key, mcmc.num_chains)
        if is_single or is_vectorised:
            return sampler.init(keys, mcmc.num_warmup, self.init_params, self.args, self.kwargs)
        first = jax.tree.map(lambda leaf: leaf[0], self.init_params)
        state = sampler.init(keys[0], mcmc.num_warmup, first, self.args, self.kwargs)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (mcmc.num_chains, *jnp.shape(leaf))), state)

    def _fingerprint(self, state: Any) -> str:
        """What decides where the run goes and what is stored of it, as one line of text."""
        mcmc = self.mcmc
        arrays, rest = partition((self.args, self.kwargs))
        is_batched = mcmc.num_chains > 1 and mcmc.chain_method != "vectorized"
        one = jax.tree.map(lambda leaf: leaf[0], state) if is_batched else state
        position = operator.attrgetter(self.sampler.sample_field)(state)
        if mcmc.num_chains > 1:
            position = jax.tree.map(lambda leaf: leaf[0], position)
        to_sites = mcmc.postprocess_fn or self.sampler.postprocess_fn(self.args, self.kwargs)
        sites = jax.eval_shape(to_sites, position)
        self._check_stored(state, sites)

        def step(state: Any) -> Any:
            # Data are known, as in MCMC: models may look at them to know how many groups there are, say.
            return self.sampler.sample(state, self.args, self.kwargs)

        return json.dumps(
            {
                "rng_key": digest(self.rng_key),
                "num_warmup, num_chains, thinning or init_params": digest(
                    mcmc.num_warmup, mcmc.num_chains, mcmc.thinning, jax.tree.leaves(self.init_params)
                ),
                "data or other arguments": digest(rest.leaves, str(rest.structure), arrays),
                "model or kernel": program_digest(step, one),
                "choice of what is stored": program_digest(to_sites, position)
                + digest(sorted(sites), self.extra_fields),
            }
        )

    def _check_stored(self, state: Any, sites: Any) -> None:
        if not isinstance(sites, dict):
            raise ValueError(f"positions must be a dictionary of sites, but are a {type(sites).__name__}.")
        sample_field = self.sampler.sample_field
        for name in (*self.sampler.default_fields, *self.extra_fields):
            if name.lstrip("~").split(".")[0] == sample_field:
                continue
            value = operator.attrgetter(name)(state)
            if not isinstance(value, jax.Array):
                raise TypeError(
                    f"extra fields must be arrays, but {name!r} is a {type(value).__name__}; name one of its parts, "
                    f"such as '{name}.step_size'."
                )


def _refuse_other_runs(path: Path, stored: str, own: str) -> None:
    """The first thing in which two runs differ."""
    before, now = json.loads(stored), json.loads(own)
    differing = [name for name in now if before.get(name) != now[name]]
    if differing:
        raise ValueError(
            f"the folder {path.parent} holds a run with another {differing[0]}; pass the same one to go on with it, or "
            "another folder to start anew."
        )
