"""Text from a trained model, on one process: the plain model with the full tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from megacore.parallel.plan import tied_names
from megacore.parallel.stage import logits_of
from megacore.train import checkpoint
from megacore.train.assemble import family
from megacore.train.config import ModelSettings, from_tree
from megacore.train.data import tokenizer as bpe
from megacore.train.precision import precision
from megacore.train.resume import of_a_run


def open_checkpoint(path: str | Path) -> checkpoint.Found:
    """The checkpoint that `path` is, by its content and not its name; else the newest of a folder of checkpoints, or of
    a run's folder."""
    path = Path(path)
    if (path / "metadata.json").is_file():
        return checkpoint.read(path)
    found = checkpoint.find(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if found is None:
        raise ValueError(f"checkpoint={str(path)!r} holds no checkpoint; give a run's folder or one of its checkpoints")
    return found


def load_model(found: checkpoint.Found) -> tuple[nn.Module, ModelSettings]:
    """The plain model with the checkpoint's weights, ready for generation (fp32 unless it was trained in fp64)."""
    extra = of_a_run(found)
    settings = from_tree(extra["settings"], str(found.path)).model
    with torch.device("meta"):
        model = family(settings, seed=0).build()
    tied = {other: first for first, *others in tied_names(model) for other in others}
    names = [name for name, _ in model.named_parameters()]
    full = checkpoint.read_full(found, [f"model/{name}" for name in names])
    dtype = precision(str(extra["model"].get("precision"))).main
    weights = {name: full[f"model/{name}"].to(dtype) for name in names}
    model.load_state_dict(weights | {other: weights[first] for other, first in tied.items()}, assign=True)
    return model.eval(), settings


@torch.no_grad()
def generate(
    model: nn.Module, ids: Tensor, tokens: int, *, window: int, temperature: float = 0.8, top_k: int = 40, seed: int = 0
) -> Tensor:
    """Continue `ids` [S] by `tokens` tokens -> [S + tokens]. Each is drawn from softmax(logits / temperature) over the
    `top_k` likeliest tokens (0: all); temperature 0 takes the likeliest. The last `window` tokens are seen. No
    key-value cache: cost grows with tokens * window."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        logits = logits_of(model(ids[None, -window:]))[0, -1].float()
        if temperature == 0:
            chosen = logits.argmax()[None]
        else:
            best = torch.topk(logits, min(top_k or len(logits), len(logits)))
            share = torch.softmax(best.values / temperature, dim=-1)
            chosen = best.indices[torch.multinomial(share, 1, generator=generator)]
        ids = torch.cat([ids, chosen])
    return ids


def continue_text(
    path: str | Path,
    prompt: str,
    *,
    tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    tokenizer: str | Path | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> str:
    """The prompt and its continuation. The tokenizer is the one given, else that of the run's folder, else the
    data's. `note` is told of each newer checkpoint that was passed over."""
    if tokens < 0 or temperature < 0 or top_k < 0:
        raise ValueError(
            f"tokens={tokens}, temperature={temperature}, top_k={top_k}: one is negative; give numbers >= 0"
        )
    found = open_checkpoint(path)
    for line in found.skipped:
        note(f"checkpoint skipped: {line}")
    if found.skipped:
        note(f"text from step {found.step}: {found.path}")
    model, settings = load_model(found)
    coder = bpe.load(tokenizer or _tokenizer_of(found))
    ids = coder.encode(prompt, add_special_tokens=False).ids or [bpe.end_of_document(coder)]
    if max(ids) >= settings.vocab_size:
        raise ValueError(
            f"the tokenizer gives id {max(ids)}, the model has vocab_size={settings.vocab_size}; give the run's own"
        )
    out = generate(
        model, torch.tensor(ids), tokens, window=settings.seq_length, temperature=temperature, top_k=top_k, seed=seed
    )
    return coder.decode(out.tolist(), skip_special_tokens=True)


def _tokenizer_of(found: checkpoint.Found) -> Path:
    data = Path(found.extra["settings"]["data"]["dir"])
    run = found.path.resolve().parent.parent  # also where a link from elsewhere led here
    places = [run / "tokenizer.json", data / "tokenizer.json"]
    for place in places:
        if place.is_file():
            return place
    raise ValueError(f"no tokenizer.json in {' or '.join(str(p.parent) for p in places)}; give --tokenizer FILE")
