"""Long runs in pieces, each written to disk as it is done, that continue where they were stopped."""

import os
from pathlib import Path
from typing import Any

from jax import Array
from numpyro.infer import MCMC
from tqdm.auto import tqdm

from numpyro_wide import _resume
from numpyro_wide._checks import check_key, kind_of, whole_number
from numpyro_wide.runs._files import check_free, no_room
from numpyro_wide.runs._identity import PROGRAMS, Call, identify
from numpyro_wide.runs._lock import sole_use
from numpyro_wide.runs._stored_draws import STATE, Pieces, StoredDraws, Writer


def run_in_pieces(
    mcmc: MCMC,
    folder: str | os.PathLike,
    rng_key: Array,
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
    the same arguments, this continues from there, and ends with the same draws, bit for bit, as a run that was never
    stopped. Warmup is done once, and its end is the first state that is written. Called with a larger ``num_samples``,
    a finished run continues.

    One process at a time runs in a folder; a second one is refused. What is there already is read through; the run
    continues only if it is what was written. Room on the disk is taken before it is used: where there is none, nothing
    is lost.

    Args:
        mcmc: the chains; its ``num_samples`` is the size of a piece, and its warmup, chains and chain method those of
            the run.
        folder: a folder of this run alone, on a disk with room for all draws.
        rng_key: a PRNG key.
        *model_args: positional arguments of the model, as ``MCMC.run`` takes them.
        num_samples: number of draws of each chain in all, a multiple of the piece's size; before thinning, as NumPyro
            counts. Where there are more already, they stay.
        extra_fields: names of fields of the state to store beside the draws, as ``MCMC.run`` takes them; arrays all.
        init_params: first position in unconstrained coordinates, as ``MCMC.run`` takes it.
        progress_bar: whether to show a bar over the whole.
        **model_kwargs: keyword arguments of the model.

    Returns:
        The draws, memory-mapped, to be read as an ``MCMC`` after its run.

    Raises:
        TypeError: if ``mcmc`` is not an ``MCMC``, ``rng_key`` not a PRNG key, or a site or an extra field not an array
            of numbers.
        ValueError: if ``num_samples`` is no multiple of the piece's size, the positions are not a dictionary of sites,
            a file of the folder is damaged, or the folder holds a run of another model, kernel, key or data.
        RuntimeError: if another process runs in the folder.
        OSError: if the disk is full; once there is room, the same call continues from the last piece.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, tempfile, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> from numpyro_wide.runs import run_in_pieces
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
        raise TypeError(f"mcmc must be a numpyro.infer.MCMC, but is {kind_of(mcmc)}.")
    check_key("rng_key", rng_key, "run_in_pieces(mcmc, folder, rng_key, x, y, num_samples=...)", several=True)
    whole_number("num_samples", num_samples)
    # Every piece is a run of the same compiled program, so that all are of one size.
    if num_samples % mcmc.num_samples or mcmc.num_samples % mcmc.thinning:
        raise ValueError(
            f"num_samples must be a multiple of the piece's size, mcmc.num_samples={mcmc.num_samples}, and that one of "
            f"thinning={mcmc.thinning}, but is {num_samples}."
        )
    folder, total = Path(folder), num_samples // mcmc.thinning
    run = _Run(mcmc, folder, Call(rng_key, model_args, model_kwargs, tuple(extra_fields), init_params))
    with sole_use(folder), tqdm(total=total, desc="sample", disable=not progress_bar) as bar:
        try:
            run.go_on(total, bar)
        finally:
            # However it ends, for example by Ctrl-C: its next run, of other data perhaps, would be without warmup.
            mcmc.post_warmup_state = None
    return StoredDraws(folder, mcmc.sampler)


class _Run:
    """Chains, and the folder that holds their latest state.

    Args:
        mcmc: the chains.
        folder: the folder of the run.
        call: the arguments of the run.
    """

    def __init__(self, mcmc: MCMC, folder: Path, call: Call):
        self.mcmc, self.folder, self.call = mcmc, folder, call
        self.identity = identify(mcmc, call)
        self.state: Any = None

    def go_on(self, total: int, bar: tqdm) -> None:
        """Append pieces until there are as many draws of each chain."""
        path, pieces = self.folder / STATE, Pieces.none()
        is_new = not path.exists()
        if not is_new:
            pieces = self._take_up(path)
        done, piece = pieces.num_samples, self.mcmc.num_samples // self.mcmc.thinning
        if done < total and (total - done) % piece:
            raise ValueError(
                f"there are {done} draws in {self.folder}, and pieces of {piece} do not lead from there to {total}; "
                "choose mcmc.num_samples and num_samples so that they do."
            )
        writer = Writer(self.folder, total, pieces)
        if is_new:
            # Before the warmup: a disk that will not do is to be told of at once, not after hours.
            check_free(self.folder, total * self.identity.num_bytes)
            self._warm_up()
            self._save(writer.pieces)
        bar.update(min(done, total))
        while writer.pieces.num_samples < total:
            # Draws first, then the state: a piece on disk that no state counts is drawn again, and overwritten. The
            # other way round an interruption would lose draws.
            writer.write(self._next_piece())
            self._save(writer.pieces)
            bar.update(piece)

    def _take_up(self, path: Path) -> Pieces:
        """Take up the latest state; return the record of the pieces before it."""
        stored = _resume.read(path)
        pieces = Pieces.read(path, stored)
        _resume.refuse_another_run(
            f"the folder {self.folder}", str(stored["['run']"]), self.identity.text, kind="folder", programs=PROGRAMS
        )
        self.state = _resume.restore(path, stored, self._record(self.identity.state, pieces))["state"]
        return pieces

    def _warm_up(self) -> None:
        call = self.call
        options = {"extra_fields": call.extra_fields, "init_params": call.init_params}
        self.mcmc.warmup(call.rng_key, *call.args, **options, **call.kwargs)
        self.state = self.mcmc.last_state

    def _save(self, pieces: Pieces) -> None:
        path = self.folder / STATE
        try:
            _resume.save(path, self._record(self.state, pieces))
        except OSError as error:
            raise no_room(error, path, "the state of the chains") from error

    def _record(self, state: Any, pieces: Pieces) -> dict[str, Any]:
        return {"run": self.identity.text, "pieces": pieces, "state": state}

    def _next_piece(self) -> dict[str, dict[str, Any]]:
        """Draw the next piece: draws (chain, draw, ...) by site, and extra fields."""
        mcmc, call, shown = self.mcmc, self.call, self.mcmc.progress_bar
        # NumPyro continues from this state without warmup. The bar of the whole run takes the place of one a piece.
        mcmc.post_warmup_state, mcmc.progress_bar = self.state, False
        try:
            # A kernel with a potential function asks for a position before it looks at the state.
            options = {"extra_fields": call.extra_fields, "init_params": call.init_params}
            mcmc.run(self.state.rng_key, *call.args, **options, **call.kwargs)
        finally:
            mcmc.progress_bar = shown
        self.state = mcmc.last_state
        samples, fields = mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields(group_by_chain=True)
        return {"samples": samples, "extra_fields": fields}
