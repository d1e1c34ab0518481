"""Faults that the tests must notice: a text that stands once in a file of the package, and its replacement.

Each names the test files that are there to notice it. Most are of one kind: a setting that does not reach the
part which it is for.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    fault: str
    file: str  # below distgpt/
    old: str
    new: str
    tests: str  # a file below tests/, and what else pytest is given


WIRING = "test_wiring.py"
_RECORDING = "{}self.directory.record(metrics)\n            self.listener.evaluated"

MUTATIONS = [
    # From settings to parts
    Mutation("weights never decay", "model/optim.py", "1 - lr * config.weight_decay", "1.0", WIRING),
    Mutation("decay at the peak rate", "model/optim.py", "1 - lr * config", "1 - config.lr * config", WIRING),
    Mutation("clip is ignored", "model/optim.py", "config.clip,", "0.0,", WIRING),
    Mutation("eps is ignored", "model/optim.py", "c.eps,", "1e-8,", WIRING),
    Mutation("betas are exchanged", "model/optim.py", "c.beta1,", "c.beta2,", WIRING),
    Mutation(
        "the warm-up is a step late",
        "model/optim.py",
        "(step + 1) / config.warmup",
        "step / config.warmup",
        WIRING,
    ),
    Mutation(
        "bias correction of the next step",
        "model/optim.py",
        "config.beta2 ** (step + 1)",
        "config.beta2 ** (step + 2)",
        WIRING,
    ),
    Mutation("min_lr is ignored", "model/optim.py", "config.min_lr + (", "(", WIRING),
    Mutation(
        "--seed does not reach the batches",
        "training/open.py",
        "t.seed, t.shift_windows",
        "0, t.shift_windows",
        WIRING,
    ),
    Mutation(
        "--seed does not reach the weights", "training/open.py", "initialise(t.seed)", "initialise(0)", WIRING
    ),
    Mutation("--top-k is ignored", "commands/infer.py", "(temperature, top_k,", "(temperature, 0,", WIRING),
    Mutation("--top-p is ignored", "commands/infer.py", "top_p, seed)", "1.0, seed)", WIRING),
    # What is counted and said
    Mutation(
        "bits per byte are nats", "evaluation/report.py", "held.loss / math.log(2)", "held.loss", WIRING
    ),
    Mutation(
        "HellaSwag per token is the sum",
        "evaluation/hellaswag.py",
        "(sums / counts, sums)",
        "(sums, sums)",
        WIRING,
    ),
    Mutation("the last step is not logged", "training/loop.py", " and self.step != t.steps", "", WIRING),
    Mutation(
        "a profile's rate is a rank's",
        "measure/profile/result.py",
        "gflop / mean.step_s,",
        "gflop / mean.step_s / len(ranks),",
        WIRING,
    ),
    Mutation(
        "one token too few is validated",
        "evaluation/validation.py",
        "min(most + 1,",
        "min(most,",
        "test_scoring.py",
    ),
    # Ranks
    Mutation(
        "the gradient's norm grows with the ranks",
        "training/step.py",
        "(self._norm()[0])) * self._scale",
        "(self._norm()[0]))",
        WIRING,
    ),
    Mutation(
        "gradients are summed, not averaged",
        "training/step.py",
        "1.0 / self.comm.size",
        "1.0",
        WIRING,
    ),
    Mutation(
        "all ranks record an evaluation",
        "training/loop.py",
        _RECORDING.format("if self.comm.rank == 0:\n            "),
        _RECORDING.format("if True:\n            "),
        WIRING,
    ),
    Mutation(
        "ranks are exchanged",
        "data/batches.py",
        "* size + rank)",
        "* size + size - 1 - rank)",
        "test_batches.py",
    ),
    Mutation("all ranks see the same rows", "data/batches.py", "* size + rank)", "* size)", WIRING),
    Mutation(
        "ranks differ unseen",
        "training/loop.py",
        "self.comm.largest(own) != -",
        "self.comm.largest(own) == -1 != -",
        "test_mpi.py -k drift",
    ),
    # Resuming
    Mutation(
        "the best loss is forgotten",
        "training/open.py",
        "trainer.best_loss = on_root(",
        "_ = on_root(",
        WIRING,
    ),
    Mutation(
        "micro-batches are those of other ranks",
        "training/plan.py",
        ' if self.state.get("world_size") == ranks else 0',
        "",
        WIRING,
    ),
    Mutation(
        "a manifest's hash is not looked at", "saved/checkpoint.py", ", _listed(path, name)[1])", ")", WIRING
    ),
    Mutation(
        "a checkpoint too many is kept",
        "saved/checkpoint.py",
        "[keep:]",
        "[keep + 1 :]",
        "test_checkpoint.py",
    ),
    # What survives a power cut
    Mutation("a shard is not synced", "data/shardfile.py", "os.fsync(self._file.fileno())", "pass", WIRING),
    Mutation("a file is not synced", "files.py", "os.fsync(file.fileno())", "pass", WIRING),
    Mutation("a name is not synced", "files.py", "sync_directory(path.parent)", "pass", WIRING),
    # Data
    Mutation("targets are the inputs", "data/batches.py", "window[1:]", "window[:-1]", WIRING),
    Mutation(
        "the third word of a piece is not compared",
        "data/tokenizers/bpe_loops.py",
        " and rows[slot, 2] == c",
        "",
        WIRING,
    ),
    Mutation(
        "'ll is cut after one letter",
        "data/tokenizers/bpe_loops.py",
        'return 3 if a == ord("l")',
        'return 2 if a == ord("l")',
        "test_bpe_fast.py",
    ),
    # Weights of others
    Mutation(
        "attn.c_proj is not transposed",
        "saved/huggingface/gpt2.py",
        "turned=True",
        'turned=theirs != "attn.c_proj"',
        "test_published_weights.py",
    ),
    # Arithmetic
    Mutation(
        "a sign in LayerNorm's gradient",
        "kernels/fused/norm.py",
        "(g - total - xhat * along)",
        "(g - total + xhat * along)",
        "test_kernels.py",
    ),
    Mutation(
        "a sign in GELU's gradient",
        "kernels/fused/activation.py",
        "value * (one - sigmoid) * (linear",
        "value * (one + sigmoid) * (linear",
        "test_kernels.py",
    ),
    Mutation(
        "a query sees the key behind it",
        "kernels/fused/attention.py",
        "seen + i, scale)",
        "min(seen + i + 1, stop), scale)",
        "test_kernels.py",
    ),
    Mutation(
        "a rotation turns the other way",
        "kernels/fused/rope.py",
        "real(-1) if inverse else real(1)",
        "real(1)",
        "test_kernels.py",
    ),
    Mutation(
        "the window slides one too far",
        "model/generate.py",
        "[: len(self._seen) - limit]",
        "[: len(self._seen) - limit + 1]",
        "test_generate.py",
    ),
    Mutation(
        "top_p keeps a token too many",
        "model/generate.py",
        "sampling.top_p)) + 1",
        "sampling.top_p)) + 2",
        "test_generate.py",
    ),
    # Ways out
    Mutation(
        "a damaged file ends with another code",
        "errors.py",
        "exit_code = 65",
        "exit_code = 66",
        "test_forkserver.py",
    ),
    Mutation(
        "an interrupt ends with another code", "comm/launched.py", "70, 130", "70, 1", "test_forkserver.py"
    ),
]
