"""Trains the embedded default model from nothing, on a CPU: ``python -m scripts.embedded.train --help``.

Four lessons decide whether so small a model learns at all (docs/embedded-model.md tells how they were found):

1. the tower first, with dense labels: each patch says the colour, shape and digit under it, where that is, which it is from
   the left and how many there are: nothing else tells the language model of places;
2. each visual token must say its word through the language model's own output layer, which grounds the words;
3. then the language model joins with the answers, while the two losses above fade;
4. each word of a question says, half-way up the language model, whether the picture shows it; and plain yes-or-no questions
   come before negated ones: with both from the start, presence and answer are uncorrelated.

One picture carries several question blocks that cannot see each other, so the picture is paid for once. Questions that
come before their picture, system messages and talk without a picture have batches of their own.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers.models.qwen2_vl.modeling_qwen2_vl as qwen2_vl
from torch import nn
from transformers import Qwen2Tokenizer, Qwen2VLForConditionalGeneration

from scripts.embedded import build, pictures, questions
from scripts.embedded.batches import CLASSES, IGNORE, Batch, Encoder
from scripts.embedded.pictures import COLOR_NAMES, SHAPES, Picture

FLAG_LAYER = 2  # the decoder layer behind which words say whether the picture shows them
PLACE_WORDS = [
    ["top", "left"], ["top"], ["top", "right"],
    ["left"], ["center"], ["right"],
    ["bottom", "left"], ["bottom"], ["bottom", "right"],
]  # fmt: skip


class Trainer:
    """Model, label heads and losses."""

    def __init__(self, model: Qwen2VLForConditionalGeneration, encoder: Encoder) -> None:
        self.model, self.encoder = model, encoder
        self.heads = nn.Linear(model.config.vision_config.embed_dim, sum(CLASSES))
        self.flag = nn.Linear(model.config.text_config.hidden_size, 2)
        self.halfway: list[torch.Tensor] = []
        model.model.language_model.layers[FLAG_LAYER].register_forward_hook(lambda m, a, out: self.halfway.append(out))
        first = lambda words: encoder.text(words)[0]  # noqa: E731
        both = lambda word: [first(word), first(" " + word)]  # noqa: E731
        self.words = [
            torch.tensor([[0, 0]] + [both(c) for c in COLOR_NAMES]),
            torch.tensor([[0, 0]] + [both(s) for s in SHAPES]),
            torch.tensor([[0, 0]] + [[first(str(d))] * 2 for d in range(10)]),
            torch.tensor([[0, 0]] + [[first(f" {w}") for w in (words * 2)[:2]] for words in PLACE_WORDS]),
            torch.zeros(5, 2, dtype=torch.long),
            torch.tensor([[0, 0]] + [[first(questions.NUMBER_WORDS[n])] * 2 for n in range(1, 6)]),
        ]
        self.accuracy = [0.0] * (len(CLASSES) + 1)

    def dense_loss(self, patches: torch.Tensor, merged: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Patches ``[n, vision_hidden]`` name their classes; cells ``[n / 4, hidden]`` say their words."""
        logits = self.heads(F.layer_norm(patches, patches.shape[-1:])).split(CLASSES, -1)
        loss = patches.new_zeros(())
        for k, (logit, size) in enumerate(zip(logits, CLASSES, strict=True)):
            weight = torch.tensor([0.3] + [1.0] * (size - 1))
            if (labels[:, k] >= 0).any():
                loss = loss + F.cross_entropy(logit, labels[:, k], weight, ignore_index=IGNORE)
            ink = labels[:, k] > 0
            if ink.any():
                right = (logit.argmax(-1) == labels[:, k])[ink].float().mean().item()
                self.track(k, right)
        cells = labels.view(-1, 4, len(CLASSES))
        wanted = torch.zeros(len(cells), self.model.lm_head.weight.shape[0])
        for k, table in enumerate(self.words):
            if not table.any():
                continue
            for corner in range(4):
                label = cells[:, corner, k].clamp(min=0)
                for spelling in range(2):
                    wanted.scatter_add_(1, table[label][:, spelling : spelling + 1], (label > 0).float()[:, None])
        total = wanted.sum(1, keepdim=True)
        ink = total[:, 0] > 0
        if ink.any():
            said = F.linear(self.words_norm(merged[ink]), self.model.lm_head.weight.detach())
            loss = loss - 0.3 * (wanted[ink] / total[ink] * F.log_softmax(said, -1)).sum(-1).mean()
        return loss

    def words_norm(self, cells: torch.Tensor) -> torch.Tensor:
        """The decoder's last norm, with weights that this loss does not move."""
        norm = self.model.model.language_model.norm
        return F.rms_norm(cells, cells.shape[-1:], norm.weight.detach(), norm.variance_epsilon)

    def track(self, k: int, right: float) -> None:
        self.accuracy[k] = 0.97 * self.accuracy[k] + 0.03 * right

    def flag_loss(self, halfway: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
        """Words of questions ``[pictures, length, hidden]`` say whether the picture shows them."""
        chosen = shown != IGNORE
        if not chosen.any():
            return halfway.new_zeros(())
        logits = self.flag(F.layer_norm(halfway[chosen], halfway.shape[-1:]))
        self.track(len(CLASSES), (logits.argmax(-1) == shown[chosen]).float().mean().item())
        return F.cross_entropy(logits, shown[chosen])

    def forward(self, batch: Batch, language: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Answer loss, dense loss and ``[answer_tokens]`` of which were right; zeros where there is nothing to do."""
        zero = torch.zeros(())
        rows, columns = batch.grid
        language_model = self.model.model.language_model
        embeds = language_model.embed_tokens(batch.ids)
        dense = zero
        if rows:
            grids = torch.tensor([[1, 2 * rows, 2 * columns]] * len(batch.ids))
            seen = self.model.model.visual(batch.patches, grid_thw=grids, return_dict=True)
            dense = self.dense_loss(seen.last_hidden_state, seen.pooler_output, batch.labels)
            if not language:
                return zero, dense, zero
            mask = batch.ids == self.encoder.special["<|image_pad|>"]
            if int(mask.sum()) != len(seen.pooler_output):  # one picture behind several questions: repeat its cells
                per = mask.sum(1) // (rows * columns)
                cells = seen.pooler_output.view(len(batch.ids), rows * columns, -1)
                seen.pooler_output = torch.cat([c.repeat(int(n), 1) for c, n in zip(cells, per, strict=True)])
            embeds = embeds.masked_scatter(mask.unsqueeze(-1), seen.pooler_output)
        length, block = embeds.shape[1], batch.block
        visible = torch.ones(length, length, dtype=torch.bool).tril() & (
            (block[:, None, :] == 0) | (block[:, :, None] == block[:, None, :])
        )
        mask = {"full_attention": visible[:, None]}
        self.halfway.clear()
        hidden = language_model(inputs_embeds=embeds, position_ids=batch.positions, attention_mask=mask,
                                use_cache=False).last_hidden_state  # fmt: skip
        wanted = batch.targets[:, 1:]
        chosen = wanted != IGNORE
        logits = F.linear(hidden[:, :-1][chosen], self.model.lm_head.weight)
        weights = batch.weights[:, 1:][chosen]
        answers = (F.cross_entropy(logits, wanted[chosen], reduction="none") * weights).sum() / weights.sum()
        answers = answers + 0.5 * self.flag_loss(self.halfway[0], batch.shown)
        return answers, dense, logits.argmax(-1) == wanted[chosen]

    def evaluate_with(self, weights: dict[str, torch.Tensor], seed: int, per_kind: int) -> dict[str, tuple[float, int]]:
        """:meth:`evaluate` with other weights than those in training."""
        live = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(weights)
        scores = self.evaluate(seed, per_kind)
        self.model.load_state_dict(live)
        return scores

    @torch.no_grad()
    def evaluate(self, seed: int, per_kind: int) -> dict[str, tuple[float, int]]:
        """Share of answers right to the last token, by kind, on fresh pictures; held-out fonts and writers."""
        rng, right, asked = random.Random(seed), defaultdict(int), defaultdict(int)
        for round_number in range(per_kind):
            for batch in (self.encoder.batch(rng, s, False) for s in held_out_samples(rng, round_number)):
                _, _, good = self.forward(batch, True)
                all_good = torch.ones_like(batch.targets[:, 1:], dtype=torch.bool)
                all_good[batch.targets[:, 1:] != IGNORE] = good
                for i, kinds in enumerate(batch.kinds):
                    for kind, number in kinds:
                        asked[kind] += 1
                        right[kind] += bool(all_good[i][batch.block[i, 1:] == number].all())
        return {kind: (round(right[kind] / asked[kind], 3), asked[kind]) for kind in sorted(asked)}


def held_out_samples(rng: random.Random, round_number: int):
    scenes = [pictures.scene(rng, *(grid := pictures.SCENE_GRIDS[round_number % len(pictures.SCENE_GRIDS)])) for _ in range(24)]
    assert grid
    easy = [pictures.scene(rng, 4, 4, easy=True) for _ in range(24)]
    digits = 1 + round_number % 3
    numbers = [
        pictures.number(rng, *pictures.NUMBER_GRIDS[digits][round_number // 3 % 4], digits, held_out=True) for _ in range(24)
    ]
    images, targets = pictures.handwritten_digits()
    written = []
    for index in rng.sample(range(pictures.HANDWRITTEN_TRAINING, len(images)), 24):
        image = pictures.Image.fromarray(images[index], "L").convert("RGB").resize((32, 32), pictures.Image.Resampling.BICUBIC)
        written.append(Picture(image, np.ones((32, 32), np.uint8), number=str(targets[index]), handwritten=True))
    for group, prefix in ((scenes, ""), (easy, "easy_"), (numbers, ""), (written, "")):
        yield [(p, [(prefix + kind, q, a) for kind, q, a in questions.ask(rng, p)]) for p in group]


def training_samples(
    rng: random.Random, size: int, language: bool, negation: float
) -> tuple[list[tuple[Picture | None, list[questions.Triple]]], bool]:
    """A batch's worth of pictures of one size with questions; the second value says that questions come first."""
    question_first = language and rng.random() < 0.12
    if language and rng.random() < 0.03:
        return [(None, [("chat", *questions.chat(rng)) for _ in range(4)]) for _ in range(size)], False
    draw = rng.random()
    if draw < 0.35:
        grid = rng.choice(pictures.SCENE_GRIDS)
        shown = [pictures.scene(rng, *grid) for _ in range(size)]
    elif draw < 0.68:
        shown = [pictures.easy_vqa(rng) if rng.random() < 0.5 else pictures.scene(rng, 4, 4, easy=True) for _ in range(size)]
    elif draw < 0.93:
        digits = rng.choice([1, 1, 2, 3])
        grid = rng.choice(pictures.NUMBER_GRIDS[digits])
        shown = [pictures.number(rng, *grid, digits) for _ in range(size)]
    else:
        shown = [pictures.handwritten(rng) for _ in range(2 * size)]
    limit = 2 if question_first else 8
    return [(p, questions.ask(rng, p, negation)[:limit] if language else []) for p in shown], question_first


def batched_attention(self, hidden_states, cu_seqlens, position_embeddings=None, **_):
    """The tower's attention for pictures of one size: one batched call where the stock code loops over pictures."""
    n, count = hidden_states.shape[0], len(cu_seqlens) - 1
    q, k, v = self.qkv(hidden_states).view(n, 3, self.num_heads, -1).unbind(1)
    q, k = qwen2_vl.apply_rotary_pos_emb_vision(q, k, *position_embeddings)
    q, k, v = (t.reshape(count, n // count, self.num_heads, -1).transpose(1, 2) for t in (q, k, v))
    return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, -1))


def linear_patches(self, patches):
    """The patch convolution as the matrix product that it is."""
    return F.linear(patches, self.proj.weight.view(self.embed_dim, -1))


def rate(step: int, args: argparse.Namespace) -> float:
    """Warm-up, constant, then linear to a fiftieth over the last part."""
    decay_from = args.steps * (1 - args.decay)
    fade = 1.0 if step < decay_from else max(0.02, (args.steps - step) / (args.steps - decay_from))
    return args.rate * min(1.0, (step + 1) / 100) * fade


def save(
    out: Path, trainer: Trainer, average: dict[str, torch.Tensor], optimizer, step: int, log: list, dtype=torch.float32
) -> None:
    """The averaged weights as a checkpoint, and what ``--resume`` needs."""
    live = {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(average)
    (trainer.model if dtype == torch.float32 else trainer.model.to(dtype)).save_pretrained(out)
    trainer.model.to(torch.float32).load_state_dict(live)
    trainer.encoder.tokenizer.save_pretrained(out)
    state = {
        "live": live,
        "average": average,
        "heads": trainer.heads.state_dict(),
        "flag": trainer.flag.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
    }
    torch.save(state, out / "resume.pt.tmp")
    (out / "resume.pt.tmp").rename(out / "resume.pt")
    (out / "training_log.json").write_text(json.dumps(log, indent=1))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m scripts.embedded.train --out build/embedded --steps 9000 --threads 1",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint, the log and resume.pt")
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--tower-steps", type=int, default=1500, help="steps with dense labels only")
    parser.add_argument("--negation-from", type=int, default=6000, help="first step with negated yes-or-no questions")
    parser.add_argument("--batch", type=int, default=24, help="pictures a step")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--decay", type=float, default=0.4, help="share of the steps, at the end, over which the rate falls")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from OUT/resume.pt; --steps may differ")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    qwen2_vl.VisionAttention.forward = batched_attention
    qwen2_vl.PatchEmbed.forward = linear_patches
    tokenizer = Qwen2Tokenizer.from_pretrained(args.out) if args.resume else build.build_tokenizer()
    model = build.build_model(tokenizer, args.seed).train()
    args.out.mkdir(parents=True, exist_ok=True)
    build.save_processor(tokenizer, args.out)
    trainer = Trainer(model, Encoder(tokenizer))
    language = [*model.model.language_model.parameters(), *trainer.flag.parameters()]
    tower = [*model.model.visual.parameters(), *trainer.heads.parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": language}, {"params": tower}], lr=args.rate, betas=(0.9, 0.98), weight_decay=0.02, fused=True
    )
    average = {k: v.detach().clone() for k, v in model.state_dict().items()}
    first, log = 0, []
    if args.resume:
        state = torch.load(args.out / "resume.pt", weights_only=True)
        model.load_state_dict(state["live"])
        trainer.heads.load_state_dict(state["heads"])
        trainer.flag.load_state_dict(state["flag"])
        optimizer.load_state_dict(state["optimizer"])
        average, first = state["average"], state["step"]
        log = json.loads((args.out / "training_log.json").read_text())
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}, steps {first}..{args.steps}",
        flush=True,
    )
    started, smooth, said, saved = time.time(), [0.0, 0.0, 0.0], time.time(), time.time()
    for step in range(first, args.steps):
        speaking = step >= args.tower_steps
        rng = random.Random(args.seed * 1_000_003 + step)
        samples, question_first = training_samples(rng, args.batch, speaking, 0.5 if step >= args.negation_from else 0.0)
        batch = trainer.encoder.batch(rng, samples, question_first)
        answer, dense, good = trainer.forward(batch, speaking)
        progress = step / args.steps
        loss = answer + (0.5 * (1 - progress) if speaking else 1.0) * dense
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for part in (language, tower):  # apart, or the larger gradient of the one shrinks the steps of the other
            torch.nn.utils.clip_grad_norm_(part, 1.0)
        optimizer.step()
        keep = min(0.996, (step + 1) / (step + 20))
        with torch.no_grad():
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 1 - keep)
        smooth = [
            0.98 * s + 0.02 * v
            for s, v in zip(smooth, (float(answer.detach()), float(dense.detach()), float(good.float().mean())), strict=True)
        ]
        if time.time() - said > 20:
            said, done = time.time(), step + 1 - first
            left = (args.steps - step - 1) * (said - started) / done / 60
            print(f"step {step + 1}/{args.steps}  answers {smooth[0]:.3f} ({smooth[2]:.3f} of tokens right)  "
                  f"dense {smooth[1]:.3f}  "
                  f"colour/shape/digit/place/rank/count/shown {' '.join(f'{a:.2f}' for a in trainer.accuracy)}  "
                  f"{(said - started) / done:.2f} s a step, {left:.0f} min left", flush=True)  # fmt: skip
        last = step + 1 == args.steps
        if last or time.time() - saved > 400:
            save(args.out, trainer, average, optimizer, step + 1, log, torch.bfloat16 if last else torch.float32)
            saved = time.time()
            if speaking:
                scores = trainer.evaluate_with(average, seed=1234, per_kind=36 if last else 9)
                log.append({"step": step + 1, "minutes": round((time.time() - started) / 60, 1), "held_out": scores})
                (args.out / "training_log.json").write_text(json.dumps(log, indent=1))
                print("held out:", "  ".join(f"{kind} {score:.2f}" for kind, (score, _) in scores.items()), flush=True)


if __name__ == "__main__":
    main()
