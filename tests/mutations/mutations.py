"""Faults that the tests must notice: a text that stands once in a file of the package, and its replacement.

Each names the test file that is there to notice it, or means tests/test_wiring.py. Most are of one kind: a
setting that does not reach the part which it is for.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    file: str  # from distgpt/
    fault: str
    old: str
    new: str
    tests: str = "test_wiring.py"  # a file below tests/, and what else pytest is given


_ON_RANKS = "data/test_shards_in_training.py -k what_one_process_does"
_SYNCED = "test_files.py -k on_the_disk"
_LOCAL, _SHARES = "training/test_local_steps.py", "training/test_balance.py"
_SUMMED, _SAME_BITS = "training/test_gradsync.py", "training/test_same_bits.py"
_OVERLAPPED = "gpu/test_gradsync_gpu.py -k overlapped_gives"
_LANES = "inference/test_compiled_lanes.py"
_BESIDE = "gpu/test_second_stream.py"
_ALIKE = "gpu/test_alike.py"
_SERVED, _STRAINED = "serving/test_serve.py", "serving/test_serve_limits.py"
_FAULTS = {
    "kernels/decoding/decode.py": [
        ("threads do not meet", "        barrier(counter, arrivals + n_threads)", "        pass", _LANES),
        ("rows without scores are scored", "if rows[i] > i:", "if rows[i] > 1000:", _LANES),
        ("the last norm is another", "weights.norms[2 * layers + 1]", "weights.norms[2 * layers]", _LANES),
    ],
    "kernels/decoding/cached_attention.py": [
        ("a value has no partner", "elif row == 0:", "elif row == 1:", _LANES),
        (
            "what a lane held is read",
            "line[j] = zip_narrowed(of[j], zero)",
            "put(line, 2 * j, of[j])",
            _LANES,
        ),
        (
            "one row asks in the last layer",
            "count - feed[4] if only_scored",
            "count - 1 if only_scored",
            _LANES,
        ),
        (
            "later keys are seen",
            "softmax(own.scores[i], own.probs[i], seen + i, seen + i,",
            "softmax(own.scores[i], own.probs[i], stop, stop,",
            _LANES,
        ),
        ("keys are turned on", "a * c + b * s", "a * c - b * s", "inference/test_dropping.py"),
    ],
    "kernels/decoding/factors.py": [
        (
            "NaN is rounded away",
            "top / np.float32(MOST) + check",
            "top / np.float32(MOST)",
            "kernels/test_int8.py",
        ),
        ("128 is not taken off", "= -OFFSET * total", "= 0", "kernels/test_int8.py"),
    ],
    "model/packed.py": [
        (
            "old weights answer",
            "known is None or not np.array_equal(known[0], checksums)",
            "known is None",
            "inference/test_packed.py",
        ),
    ],
    "saved/modelfile.py": [
        (
            "negative scales are read",
            "not (scales >= 0).all() or ",
            "",
            "inference/test_int8_models.py -k scales",
        ),
        (
            "int8 files are widened",
            'return "int8" if rounded',
            'return "float32" if rounded',
            "inference/test_int8_models.py",
        ),
    ],
    "model/optim.py": [
        ("weights never decay", "1 - lr * config.weight_decay", "1.0"),
        ("decay at the peak rate", "1 - lr * config", "1 - config.lr * config"),
        ("clip is ignored", "config.clip * (", "0.0 * ("),
        ("eps is ignored", "c.eps)", "1e-8)"),
        ("betas are exchanged", "c.beta1,", "c.beta2,"),
        ("the warm-up is a step late", "(step + 1) / config.warmup", "step / config.warmup"),
        ("bias correction of the next step", "config.beta2 ** (step + 1)", "config.beta2 ** (step + 2)"),
        ("min_lr is ignored", "config.min_lr + (", "("),
    ],
    "training/opening/open.py": [
        ("--seed does not reach the batches", "t.seed, t.shift_windows", "0, t.shift_windows"),
        (
            "the best loss is forgotten",
            "progress.best_loss, progress.best_step = _saved_best",
            "_ = _saved_best",
        ),
    ],
    "training/opening/restore.py": [
        ("--seed does not reach the weights", "initial(t.seed)", "initial(0)"),
    ],
    "inference/request.py": [
        ("settings are not checked", "about.check(name, value)", "pass"),
    ],
    "inference/batch.py": [
        (
            "another model's answers are kept",
            'if found.get("model") != self._model:',
            "if False:",
            "inference/test_prompt_files.py -k do_not_fit",
        ),
    ],
    "inference/engine_setup.py": [
        (
            "ranks do not share memory",
            "available_memory() // ranks",
            "available_memory()",
            "inference/test_lanes.py -k one_host",
        ),
    ],
    "training/report.py": [
        ("the last step is not logged", " and step != t.steps", "", "training/test_train.py -k variants"),
        (
            "all ranks record an evaluation",
            "        if not self._is_silent:\n            self._record(metrics)",
            "        if True:\n            self._record(metrics)",
            _ON_RANKS,
        ),
    ],
    "training/checkpoints.py": [
        (
            "a copy is not taken",
            "groups = self._copy.taken(live) if self._copy else",
            "groups =",
            "training/test_saving.py",
        ),
    ],
    "training/loop.py": [
        (
            "a signal does not save",
            "    run.checkpoints.on_root(lambda: run.checkpoints.write_now(run.state()))\n    raise stop",
            "    raise stop",
            "training/test_signals.py",
        ),
        (
            "an evaluation that was cut short is forgotten",
            "progress.evaluation_pending or (t",
            "False or (t",
            "training/test_signals.py",
        ),
    ],
    "training/guards/rollback.py": [
        (
            "a rollback sees the bad data again",
            "used = bad.step + run.batches.skipped",
            "used = run.progress.step",
            "training/test_badsteps.py",
        ),
    ],
    "training/guards/sanity.py": [
        (
            "ranks differ unseen",
            "run.comm.allreduce_max(own) != -",
            "run.comm.allreduce_max(own) == -1 != -",
            "training/test_mpi.py -k drift",
        ),
    ],
    "measure/profile/report.py": [
        ("a profile's rate is a rank's", "gflop / mean.step_s,", "gflop / mean.step_s / len(ranks),"),
    ],
    "evaluation/assessment.py": [
        (
            "HellaSwag per token is the sum",
            "(sums / counts, sums)",
            "(sums, sums)",
            "evaluation/test_scoring.py",
        ),
        ("bits per byte are nats", "held.loss / math.log(2)", "held.loss", "evaluation/test_scoring.py"),
        ("one token too few is validated", "min(most + 1,", "min(most,", "evaluation/test_scoring.py"),
    ],
    "training/step.py": [
        ("GPUs never agree", "if self._launched == 1:", "if False:", _ALIKE),
        (
            "units are rows of any rank",
            "rank * self._micro_batches + micro_batch, c.reproducible_parts",
            "micro_batch, c.reproducible_parts",
            _SAME_BITS,
        ),
        (
            "unlike shares weigh alike",
            "weight = n_seq * comm.size / config.batch_size",
            "weight = 1 / self._micro_batches",
            _SHARES,
        ),
        (
            "the gradient's norm grows with the ranks",
            "(self._squares()[0])) * self._norm_scale",
            "(self._squares()[0]))",
            _ON_RANKS,
        ),
        ("gradients are summed, not averaged", "1.0 / self.comm.size", "1.0", _ON_RANKS),
    ],
    "data/batches.py": [
        ("ranks are exchanged", "* size + rank)", "* size + size - 1 - rank)", "data/test_batches.py"),
        ("all ranks see the same rows", "* size + rank)", "* size)", "data/test_batches.py"),
        ("targets are the inputs", "window[1:]", "window[:-1]"),
    ],
    "training/opening/plan.py": [
        ("micro-batches are those of other ranks", "self.state.ranks == ranks and ", ""),
    ],
    "saved/checkpoint.py": [
        (
            "a manifest's hash is not looked at",
            "destination, listed.sha256, listed.header_sha256",
            "destination",
            "saved/test_checkpoint.py",
        ),
        ("a checkpoint too many is kept", "[keep:]", "[keep + 1 :]", "saved/test_checkpoint.py"),
    ],
    "data/shards.py": [
        ("a shard is not synced", "os.fsync(self._file.fileno())", "pass", _SYNCED),
    ],
    "files.py": [
        ("a file is not synced", "os.fsync(file.fileno())", "pass", _SYNCED),
        ("a name is not synced", "sync_directory(path.parent)", "pass", _SYNCED),
    ],
    "data/tokenizers/bpe_fast.py": [
        ("the third word of a piece is not compared", " and rows[slot, 2] == c", "", "data/test_bpe_fast.py"),
        (
            "'ll is cut after one letter",
            'return 3 if a == ord("l")',
            'return 2 if a == ord("l")',
            "data/test_bpe_fast.py",
        ),
    ],
    "saved/families.py": [
        (
            "attn.c_proj is not transposed",
            "transposed=len(shape) == 2)",
            "transposed=len(shape) == 2 and shape[0] != shape[1])",
            "saved/test_published_weights.py",
        ),
    ],
    "kernels/fused/rowwise.py": [
        (
            "a sign in LayerNorm's gradient",
            "(g - total - xhat * along)",
            "(g - total + xhat * along)",
            "kernels/test_kernels.py",
        ),
    ],
    "kernels/fused/linear.py": [
        (
            "a sign in GELU's gradient",
            "value * (one - sigmoid) * (linear",
            "value * (one + sigmoid) * (linear",
            "kernels/test_kernels.py",
        ),
    ],
    "kernels/cpu.py": [
        ("attention follows the number of threads", 'matmul == "auto"', "True", _SAME_BITS),
    ],
    "kernels/fused/attention_short.py": [
        (
            "a query leaves its own value out",
            'p, values, "%t1")',
            'p, values, "%t")',
            "kernels/test_attention_short.py",
        ),
    ],
    "../benchmarks/short_sequences.py": [
        (
            "the MLP gets the norm of attention",
            "weights.norms[2 * i + 1], s, m.a)",
            "weights.norms[2 * i], s, m.a)",
            "benchmarks/test_short_sequences.py",
        ),
    ],
    "kernels/fused/attention.py": [
        (
            "a rotation turns the other way",
            "number(qkv, -1) if inverse else number(qkv, 1)",
            "number(qkv, 1)",
            "kernels/test_kernels.py",
        ),
        (
            "a query sees the key behind it",
            "seen + i, stop, scale, s.sums",
            "min(seen + i + 1, stop), stop, scale, s.sums",
            "kernels/test_cpu_attention.py",
        ),
        (
            "a key gets a gradient from the query before it",
            "start + i + 1 : end",
            "start + i + 2 : end",
            "kernels/test_cpu_attention.py",
        ),
        (
            "a key forgets what earlier queries gave",
            "max(begin, start), start < begin",
            "max(begin, start), False",
            "kernels/test_cpu_attention.py",
        ),
    ],
    "kernels/fused/disk_cache.py": [
        (
            "tiles of two sizes share a folder",
            "{'-amx' * shape().amx}",
            "",
            "kernels/test_amx.py -k another_folder",
        ),
    ],
    "kernels/matmul/blocked.py": [
        (
            "a later stretch of k forgets the earlier ones",
            "flags = ACCUMULATE if begin else",
            "flags = 0 if begin else",
            "kernels/test_matmul.py -k odd_shapes",
        ),
        (
            "a later stretch adds the bias again",
            "flags = ACCUMULATE if begin else (0 if bias is None else BIAS)",
            "flags = (ACCUMULATE if begin else 0) | (0 if bias is None else BIAS)",
            "kernels/test_matmul.py -k odd_shapes",
        ),
        (
            "gradients of weights start anew at every stretch",
            "flags = ACCUMULATE if low else accumulate",
            "flags = accumulate",
            "kernels/test_matmul.py -k add_to_what_is_there",
        ),
    ],
    "kernels/matmul/microkernel.py": [
        (
            "both halves are one load",
            'always = self.new("icmp ne i64 %i, -1")',
            'always = "true"',
            "kernels/test_assembled.py -k registers",
        ),
    ],
    "kernels/matmul/vectors.py": [
        ("too many rows widened", "WIDENING = 12", "WIDENING = 14", "kernels/test_assembled.py -k registers"),
    ],
    "kernels/matmul/int8.py": [
        (
            "products are added first",
            "call {self.ints} asm",
            "freeze {self.ints} {total} ; asm",
            "kernels/test_assembled.py -k registers",
        ),
        (
            "bytes in the order of k",
            "return (0, 2, 1, 3) if",
            "return (0, 1, 2, 3) if",
            "kernels/test_int8.py",
        ),
    ],
    "kernels/matmul/layers.py": [
        (
            "the slower one is taken",
            'speeds["own"] >= TIE * speeds["blas"]',
            'speeds["own"] < TIE * speeds["blas"]',
            "kernels/test_matmul_choice.py -k faster",
        ),
        (
            "a choice that cannot be kept is used",
            "return speeds if path.exists() else None",
            "return speeds",
            "kernels/test_matmul_choice.py -k room",
        ),
    ],
    "kernels/matmul/amx.py": [
        ("k behind the last is read", "2 * i + half % 2 for", "2 * i for", "kernels/test_amx.py -k infinity"),
        (
            "a last k alone is left out",
            "add i64 %now, 1",
            "add i64 %now, 0",
            "kernels/test_amx.py -k odd_shapes",
        ),
        (
            "both halves of A share a tile register",
            "(4, 5), (6, 7)",
            "(4, 4), (6, 7)",
            "kernels/test_amx.py -k odd_shapes",
        ),
    ],
    "doctor/speed.py": [
        ("a matmul counts half", "2.0 * side**3", "1.0 * side**3", "doctor/test_peaks.py -k counted_right"),
    ],
    "inference/sample.py": [
        (
            "a prompt's tokens get the scores behind them",
            "likelihood(row, prompt[len(known)], count)",
            "likelihood(row, prompt[len(known) - 1], count)",
            "inference/test_engine.py -k own_tokens",
        ),
        (
            "the window slides one too far",
            "gone = len(self.tokens) - kept - self.begin",
            "gone = len(self.tokens) - kept - self.begin + 1",
            "inference/test_engine.py -k past_the_context",
        ),
        (
            "a guess that was wrong stays in the lane",
            "self.ended or events[-1].token != guess",
            "self.ended or guess is None",
            "inference/test_engine.py -k lookup",
        ),
        (
            "a stop string's beginning is shown",
            "range(most, 0, -1)",
            "range(most - 1, 0, -1)",
            "inference/test_engine.py -k however",
        ),
    ],
    "inference/sampling.py": [
        ("--top-k is ignored", "if 0 < how.top_k < len(scores)", "if 0 < how.top_k < 0"),
        ("--top-p is ignored", "if how.top_p < 1:", "if how.top_p < 0:"),
        (
            "top_p keeps a token too many",
            "enough)) + 1]",
            "enough)) + 2]",
            "inference/test_sampling.py -k definition",
        ),
        (
            "random numbers do not depend on the sample",
            "_mixed(seed) ^ choice",
            "_mixed(seed)",
            "inference/test_sampling.py -k random_numbers",
        ),
    ],
    "inference/engine.py": [
        (
            "scored prompts are bounded one by one",
            " or feed.scored > scored:",
            ":",
            "inference/test_engine.py -k no_more_rows",
        ),
        (
            "a prompt that has moved is shared",
            "sample.cached)\n                self._prompts.pop(sample.lane, None)",
            "sample.cached)",
            "inference/test_dropping.py -k among_others",
        ),
        (
            "another sample's prompt is taken for one's own",
            "if held is shared), None)",
            "if held is not None), None)",
            "inference/test_engine.py -k does_not_depend",
        ),
    ],
    "errors.py": [
        ("a damaged file ends with another code", "exit_code = 65", "exit_code = 66", "test_forkserver.py"),
    ],
    "interrupts.py": [
        (
            "an interrupt ends with another code",
            "signal.SIGINT: 130",
            "signal.SIGINT: 131",
            "test_forkserver.py",
        ),
        ("a signal once more is never raised", "> MEANT:", "> 1e9:", "training/test_signals.py -k second"),
    ],
    "saved/run_lock.py": [
        (
            "two processes train in one directory",
            "!= myself() and lives(",
            "is lives(",
            "saved/test_run_lock.py",
        ),
    ],
    "saved/tensors.py": [
        (
            "a header's checksum is not compared",
            "if HEADER_SUM in metadata and",
            "if not metadata and",
            "saved/test_weightsfile.py",
        ),
    ],
    "training/exchange/sharded.py": [
        (
            "shards are not shared",
            "self.comm.all_gather(self.model.params.flat, self._bounds)",
            "pass",
            _SUMMED,
        ),
        ("every rank clips by its own norm", "self.comm.sum(self._pieces)", "pass", _SUMMED),
    ],
    "training/exchange/overlapped.py": [
        ("a bucket is summed twice", "self._handed = final", "self._handed = 0", _SUMMED),
        ("a bucket is summed twice on GPUs", "self._sent = final", "self._sent = 0", _OVERLAPPED),
    ],
    "gpu/device.py": [
        (
            "what comes between recorded parts is done once",
            "self._cut.append((self.stream.end_capture(), act))",
            "self._cut.append((self.stream.end_capture(), lambda: None))",
            _OVERLAPPED,
        ),
        ("a graph outlives its choices", "self._recordings += 1", "pass", _ALIKE),
        (
            "gradients of weights begin before what they read is there",
            "device.after(self._stream, device.stream)",
            "pass",
            _BESIDE,
        ),
        (
            "nobody waits for gradients of weights",
            "self._device.after(self._device.stream, self._stream)",
            "pass",
            _BESIDE,
        ),
    ],
    "model/passes.py": [
        (
            "a layer writes over what the weights of the last one read",
            '(*ring, f"last_{ring[0]}") if self._overlaps else ring',
            "ring",
            _BESIDE,
        ),
    ],
    "gpu/launcher.py": [
        (
            "large keys are cut off",
            "key - (key >= MOST_KEY) * 2 * MOST_KEY",
            "key % MOST_KEY",
            "gpu/test_parts_between_gpus.py -k bfloat16_is_rounded",
        ),
    ],
    "gpu/exchange.py": [
        (
            "a bucket leaves a GPU before it is final",
            "self._device.after(self._second, self._device.stream)",
            "pass",
            _OVERLAPPED,
        ),
        (
            "a step on a GPU does not wait for its buckets",
            "self._device.after(self._device.stream, self._second)",
            "pass",
            _OVERLAPPED,
        ),
        (
            "what the last part has more is not summed",
            "self._ranks.reduce(cut.end, cut.end, cut.rest, cut.kind, total, last, self._stream)",
            "pass",
            "gpu/test_parts_between_gpus.py -k parts_are_summed",
        ),
        (
            "a copy on the host is dropped by age",
            "self._kept[key] = self._kept.pop(key)",
            "pass",
            "gpu/test_exchange.py -k longest_unused",
        ),
        (
            "a rank on a GPU gets its own part back",
            "mirror.send(bounds[own + 1], bounds[-1])",
            "pass",
            "gpu/test_parts_between_gpus.py -k parts_are_summed",
        ),
    ],
    "training/guards/watchdog.py": [
        (
            "every rank reports NCCL's failure",
            "if self._rank and self._reports and now",
            "if not self._size and now",
            "gpu/test_nccl_runs.py -k failure",
        ),
        (
            "nobody asks NCCL what has failed",
            "if self._nccl and (trouble",
            "if not self._size and (trouble",
            "training/test_stalls.py -k nccl",
        ),
    ],
    "training/exchange/reductions.py": [
        ("what is dropped keeps its communicators", "            comm.free()", "            pass", _SUMMED),
        ("ranks round alike", "{step} {self._comm.rank} {time}", "{step} {time}", _SUMMED),
        ("a stretch's own part stays rounded", "self._send(pieces, step)", "pass", _SUMMED),
        (
            "ranks add as they come",
            "flat.add_tree if by_twos else flat.add_parts",
            "flat.add_parts",
            _SAME_BITS,
        ),
    ],
    "model/model.py": [
        (
            "a rank has other weights in full precision than it updates",
            "flat[start - begin : stop - begin]",
            "flat[: stop - start]",
            "gpu/test_sharded_files.py -k saved_is",
        ),
    ],
    "training/exchange/choose.py": [
        (
            "what GPUs exchange in parts is not counted",
            "int(has_shards(t, ranks))",
            "0",
            "measure/test_estimate.py -k travels",
        ),
    ],
    "training/exchange/auto.py": [
        ("what auto drops is not freed", "self._exchanges.pop(name).free()", "pass", _SUMMED),
    ],
    "training/exchange/reproducible.py": [
        ("parts are added one by one", "level = ((part + 1) & -(part + 1))", "level = (1)", _SAME_BITS),
    ],
    "training/exchange/checkpointing.py": [
        ("moments of other ranks are lost", "self._comm.all_gather(whole, [", "list([", _SUMMED),
        (
            "a checkpoint has weights that only other ranks have kept",
            "{OPTIMIZER: self.some(moments), **weights}",
            "{OPTIMIZER: self.some(moments)}",
            "gpu/test_sharded_files.py -k saved_is",
        ),
    ],
    "training/exchange/local_steps.py": [
        ("every rank clips by its own norm in local steps", "both[len(extra) :]", "norm[:]", _LOCAL),
        ("a last round has no end", " or done == t.steps", "", _LOCAL),
    ],
    "training/opening/balance.py": [
        ("shares follow seconds, not speed", "(share + 1) * each for", "(share + 1) / each for", _SHARES),
    ],
    "training/schedule.py": [
        (
            "what is due within a round is lost",
            "step // every > before // every",
            "not step % every",
            _LOCAL,
        ),
    ],
    "training/exchange/replicas.py": [
        ("the velocity is lost", "k.put(buffer.flat, host.flat)", "pass", _LOCAL),
        ("all ranks get one rank's moments", "if comm.rank == rank:", "if True:", _LOCAL),
        ("weights within a round are a sum", "total /= comm.size", "pass", _LOCAL),
    ],
    "kernels/fused/flat.py": [
        ("bfloat16 is rounded down", "builder.add(bits, up)", "bits", _SUMMED),
    ],
    "kernels/fused/softmax.py": [
        (
            "keys that come later count",
            "icmp ult <{n} x i64> {places}",
            "icmp ule <{n} x i64> {places}",
            "kernels/test_cpu_attention.py",
        ),
    ],
    "gpu/matmul.py": [
        ("other arithmetic is the same GPU", "(lt.version, tf32)", "(lt.version,)", _ALIKE),
        (
            "what the first timed is timed again",
            "if adopted := self._adopted_for(plan):",
            "if adopted := 0:",
            _ALIKE,
        ),
        ("any GPU decides for others", 'if each["gpu"] == own["gpu"]', "if True", _ALIKE),
        ("each keeps its own ways", "device.choices.update(choices)", "pass", _ALIKE),
        ("each keeps its own algorithms", 'matmuls.adopt(first["algorithms"])', "False", _ALIKE),
    ],
    "gpu/cu/elementwise.cu": [
        (
            "a bias gradient leaves every second row out",
            "sum += out;",
            "if (!k) sum += out;",
            "gpu/test_cuda_kernels.py -k linear_act",
        ),
    ],
    "gpu/cu/attention.cu": [
        (
            "a bias gradient is of one sequence",
            "(long long)sequence * gridDim.y + blockIdx.y",
            "(long long)blockIdx.y",
            "gpu/test_cuda_kernels.py -k test_attention",
        ),
    ],
    "gpu/cu/optimizer.cu": [
        (
            "a block decays alike",
            "first + (long long)(blockDim.x) * W <= runs[3 * run + 1]",
            "true",
            "gpu/test_cuda_kernels.py -k adamw",
        ),
        (
            "a gradient that is not finite is used",
            "if (!(length - length == 0)) scale",
            "if (false) scale",
            "gpu/test_cuda_kernels.py -k adamw",
        ),
    ],
    "gpu/cu/common.cuh": [
        (
            "a sum over a block is read too early",
            "__syncthreads();  // whoever",
            "// whoever",
            "gpu/test_cuda_kernels.py",
        ),
    ],
    "serving/app.py": [
        ("any key will do", "if not compare_digest(given.encode(), key.encode()):", "if not given:", _SERVED),
        ("pages of other sites may ask", 'if kind != "application/json":', "if False:", _SERVED),
        ("bodies of any length are kept", "if len(body) > most:", "if False:", f"{_STRAINED} -k 100_mb"),
        (
            "a client that leaves is not noticed",
            "pass\n        self._app.runner.forget(self._call)",
            "pass",
            f"{_STRAINED} -k killed",
        ),
    ],
    "serving/completions.py": [
        ("unknown settings are passed over", "if name not in known:", "if False:", _SERVED),
        ("a client's seed is ignored", "value % (1 << 64)", "0", _SERVED),
    ],
    "serving/runner.py": [
        ("the queue has no end", "self._limits.queue:", "self._limits.queue + 9**9:", f"{_STRAINED} -k full"),
        ("a lane is never freed", "self._engine.cancel(ticket)", "pass", f"{_STRAINED} -k killed"),
        (
            "a client that does not read is served",
            "if len(self._unread) >= self._most_unread:",
            "if False:",
            f"{_STRAINED} -k does_not_read",
        ),
        ("a failed engine goes on", "self._engine = self._make()", "pass", f"{_STRAINED} -k not_finite"),
    ],
    "serving/server.py": [
        ("SIGTERM ends what runs", "await self.runner.finish()", "pass", f"{_STRAINED} -k sigterm"),
    ],
}
MUTATIONS = [Mutation(file, *fault) for file, faults in _FAULTS.items() for fault in faults]
