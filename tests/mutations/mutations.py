"""Faults that the tests must detect, as replacements of code that occurs once in a file.

They cover the most important properties: bitwise results, gradients, resuming, saved files, and settings.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    file: str  # relative to distgpt/
    tests: str  # arguments of pytest, starting with a file in tests/
    fault: str
    old: str
    new: str


_WIRED = "assembly/test_wiring.py"
_ON_RANKS = "corpora/test_shards.py -k match_one_process"
_SYNCED = "core/base/test_files.py -k on_the_disk"
_LOCAL = "parallel/test_local_steps.py"
_SUMMED, _SAME_BITS = "parallel/test_gradsync.py", "parallel/test_gradsync.py -k tree or identical or units"
_IN_MEMORY = "parallel/test_strategy.py -k memory or rows or descriptor"
_OVERLAPPED = "gpu/test_gradsync_gpu.py -k overlapped_matches"
_SLOTS = "inference/test_slots.py -k float32 or int8"
_IN_ANY_ORDER = "inference/test_engine.py -k in_any_order"
_SERVED, _STRAINED = "inference/test_serve.py", "inference/test_serve_limits.py"
_FAULTS = {
    ("cluster/jobs/batch.py", "cluster/test_submit.py"): [
        ("a job has two successors", '  if mkdir "$marker"', '  if mkdir -p "$marker"'),
        ("a deleted job is followed", 'if [ "$again" ] && [ -z "$ending" ]', 'if [ "$again" ]'),
    ],
    ("core/cpu/compiling/barrier.py", _SLOTS): [
        ("threads do not meet", "        barrier(counter, arrivals + n_threads)", "        pass")
    ],
    ("inference/decoding/loops/cached_attention.py", _SLOTS): [
        ("what a lane held is read", "line[j] = zip_narrowed(of[j], zero)", "put(line, 2 * j, of[j])"),
        ("later keys are seen", ", own.probs[i], seen + i, seen + i", ", own.probs[i], stop, stop"),
        ("keys are turned on", "a * c + b * s", "a * c - b * s"),
    ],
    ("inference/decoding/compiled.py", "inference/test_slots.py -k follows"): [
        ("old weights answer", "before is not None and np.array_equal(before, checksums)", "before is not None")
    ],
    ("core/model/optim.py", "core/model/test_model.py -k groups_have"): [
        ("tables decay at the peak rate", "lr * config.table_decay", "config.lr * config.table_decay")
    ],
    ("models/ensemble.py", "recipes/test_ensemble.py -k averages"): [
        ("the output layer adds up", " / np.float32(len(members))", ""),
        ("q, k and v are one matrix", "in spec.matrices:", "in [spec.shape]:"),
    ],
    ("recipes/ensemble.py", "recipes/test_ensemble.py -k bitwise"): [
        ("all models are equal", "t.seed + number - 1, ", "t.seed, "),
        ("an ensemble cannot grow", ".norm_groups == groups", ".norm_groups > 1"),
        ("a larger size is forgotten", "if plan.changes:", "if False:"),
    ],
    ("core/saved/rundir.py", "recipes/test_ensemble.py -k bitwise"): [
        ("an old ensemble is read", "self.ensemble.unlink(missing_ok=True)", "pass")
    ],
    ("inference/decoding/loops/weights.py", "recipes/test_ensemble.py -k averages"): [
        ("a trained ensemble is still separate", "groups > 1:", "False:")
    ],
    ("inference/quantized/operands.py", "recipes/test_ensemble.py -k averages"): [
        ("int8 reads another model's weights", "panel[first * size :]", "panel")
    ],
    ("core/model/optim.py", _WIRED): [
        ("weights never decay", "1 - decay]", "1.0]"),
        ("decay at the peak rate", "rate * config.weight_decay", "config.lr * config.weight_decay"),
        ("clip is ignored", "config.clip * (", "0.0 * ("),
        ("eps is ignored", "c.eps)", "1e-8)"),
        ("betas are exchanged", "c.beta1,", "c.beta2,"),
        ("the warm-up is a step late", "(step + 1) / config.warmup", "step / config.warmup"),
        ("bias correction of the next step", "config.beta2 ** (step + 1)", "config.beta2 ** (step + 2)"),
        ("min_lr is ignored", "last + (peak - last) * (1", "(peak - last) * (1"),
    ],
    ("core/train/setup.py", _WIRED): [
        ("the best loss is forgotten", "        trained.best,", "        None,"),
        ("--seed does not reach the weights", "initial(t.seed)", "initial(0)"),
    ],
    ("core/train/checkpoints.py", "core/train/test_saving.py"): [
        ("a copy is not taken", "groups = self._copy.update(live) if self._copy else", "groups =")
    ],
    ("callbacks/attach.py", "recipes/test_clock.py"): [
        ("the time before a stop is forgotten", "begun - spent", "begun"),
        ("the last step ends too late", "end + usual > total", "end > total + usual"),
    ],
    ("core/train/loop.py", "core/train/test_train.py -k signal_ends or later"): [
        (
            "a signal does not save",
            "    run.checkpoints.on_root(lambda: run.checkpoints.write_now(run.state()))\n    raise stop",
            "    raise stop",
        )
    ],
    ("callbacks/full_disk.py", "core/train/test_saving.py"): [
        ("the newest checkpoint is given up", ".index(newest[0]) + 1 :]", ".index(newest[0]) :]"),
        ("the newest of the old is given up first", "in reversed(saved", "in iter(saved"),
        ("the start of another run is given up", "if path.resolve() not in needed:", "if True:"),
    ],
    ("callbacks/bad_steps.py", "callbacks/test_badsteps.py"): [
        ("a rollback sees the bad data again", "used = self.step + run.batches.skipped", "used = run.progress.step")
    ],
    ("core/train/loop.py", "core/train/test_mpi.py -k differ"): [
        ("ranks differ unseen", "run.comm.allreduce_max(own) != -", "run.comm.allreduce_max(own) == -1 != -")
    ],
    ("core/data/batches.py", "inference/test_evaluation.py"): [
        ("one token too few is validated", "min(most + 1,", "min(most,")
    ],
    ("core/train/step.py", _ON_RANKS): [
        ("the gradient's norm grows with the ranks", "math.sqrt(squares) * self._scales.norm", "math.sqrt(squares)")
    ],
    ("core/train/parallel_strategy.py", _ON_RANKS): [
        ("gradients are summed, not averaged", "mean = self.mean_factor / counted", "mean = 1.0 / counted")
    ],
    ("core/data/batches.py", "core/data/test_batches.py"): [
        ("all ranks see the same rows", "* size + rank)", "* size)")
    ],
    ("corpora/packing.py", "corpora/test_documents.py"): [
        ("equal rows share documents", "taken[size] += times * repeats", "taken[size] += times")
    ],
    ("core/data/loading.py", "corpora/test_shards.py"): [
        ("the held-out text is another tokenizer's", "existing=corpus.tokenizer, ", "")
    ],
    ("core/data/batches.py", _WIRED): [
        ("--seed does not reach the batches", "t.seed, t.shift_windows", "0, t.shift_windows"),
        ("targets are the inputs", "window[1:]", "window[:-1]"),
    ],
    ("core/saved/checkpoint.py", "core/saved/test_checkpoint.py"): [
        ("a manifest's hash is not looked at", ", _listed(path, name, read_manifest(path)).header_sha256", "")
    ],
    ("core/base/files.py", _SYNCED): [
        ("a file is not synced", "file.flush()\n                os.fsync(file.fileno())", "file.flush()"),
        ("a name is not synced", "sync_directory(path.parent)", "pass"),
    ],
    ("core/cpu/fused/rowwise.py", "core/cpu/test_kernels.py"): [
        ("a sign in LayerNorm's gradient", "(g - total - xhat * along)", "(g - total + xhat * along)")
    ],
    ("core/cpu/fused/muon.py", "core/cpu/test_kernels.py -k muon"): [
        ("weights decay against the update", "if ui[j] * pi[j] >= 0", "if ui[j] * pi[j] < 0")
    ],
    ("core/cpu/teams.py", "core/cpu/test_pool.py -k member or signal"): [
        ("a thread that fails keeps its team waiting", "of_jobs[list(jobs), 0] = RELEASED", "pass"),
        ("a signal keeps a thread from its team", " signals_deferred() if is_shared else ", " "),
    ],
    ("core/cpu/graphs/capture.py", "core/cpu/test_recorded.py -k meet or made or second_call or another"): [
        ("recorded threads do not meet", "calls.mark(MEET)", "pass"),
        ("arrays that work made for itself are recorded", " captures[0].addresses != captures[1].addresses", " False"),
    ],
    ("core/cpu/graphs/launch.py", "core/cpu/test_pool.py"): [
        ("a call that failed is not told", "        self._failed.append(thread)", "        pass"),
        ("an order keeps its first arguments", "self._words[:, first : first + len(words)] = words", "pass"),
        (
            "helpers stay assigned when they are called back",
            "        self.words[0, loops.CALLED_BACK] = 1",
            "        pass",
        ),
        ("a pool keeps the arrays of the last order", "            slot.failed = _nothing", "            pass"),
    ],
    ("core/cpu/pool.py", "core/cpu/test_pool.py -k fork"): [
        (
            "a child of a fork takes its parent's helpers for assigned",
            "        self.task: Any = None",
            "        self.task: Any = getattr(self, 'task', None)",
        )
    ],
    ("core/cpu/graphs/capture.py", "core/cpu/test_recorded.py -k rows or profile"): [
        (
            "targets are looked at once",
            "counts_all = not any((targets == IGNORE_INDEX).any() for targets in self._targets)",
            "counts_all = True",
        )
    ],
    ("core/model/muon.py", "core/model/test_model.py -k muon or heads or update or groups or borders"): [
        ("a matrix is cut between ranks", "whole = round(inside) if _is_matrix(spec)", "whole = inside if spec"),
        ("ranks share no updates", "return self._bounds if len(self._bounds) > 2 else ()", "return ()"),
    ],
    ("core/cpu/fused/attention.py", "core/cpu/test_cpu_attention.py"): [
        ("a query sees the key behind it", "seen + i, stop, ", "min(seen + i + 1, stop), stop, "),
        ("a key gets a gradient from the query before it", "i, seen + i : ", "i, seen + i + 1 : "),
        ("a key forgets what earlier queries gave", "again = onto or start < begin", "again = onto"),
    ],
    ("core/cpu/matmul/amx.py", "core/cpu/test_tiles.py -k AMX or amx"): [
        ("tiles of few rows read A in place", "%fills = and i1 %lies, %full", "%fills = and i1 %lies, %lies"),
        ("the last k are read whole", "%direct = and i1 %whole, %fills", "%direct = and i1 %fills, %fills"),
        ("the second half of the rows is the first", "i64 {half * LINE}", "i64 0"),
    ],
    ("core/cpu/matmul/widening.py", "core/cpu/test_tiles.py"): [
        ("the buffer keeps one pair for all of a row", "(4, BUFFER_LINE) if", "(0, BUFFER_LINE) if"),
        ("the second halves are the first ones", '("%behind", True)', '("%behind", False)'),
        ("what lies behind A is read", "lanes_below(self._pairs)", "lanes_below(str(LANES))"),
    ],
    ("core/cpu/matmul/blocked.py", "core/cpu/test_matmul.py -k add_to_earlier_ones"): [
        ("gradients of weights start anew at every stretch", " = ACCUMULATE if low else ", " = ")
    ],
    ("core/generate/sample.py", _IN_ANY_ORDER): [
        ("the window slides one too far", ") - kept - self.begin", ") - kept - self.begin + 1"),
        ("a guess that was wrong stays in the lane", " events[-1].token != guess", " guess is None"),
    ],
    ("core/generate/sampling.py", _WIRED): [
        ("--top-k is ignored", "if 0 < sampling.top_k < len(logits)", "if 0 < sampling.top_k < 0"),
        ("--top-p is ignored", "if sampling.top_p < 1:", "if sampling.top_p < 0:"),
    ],
    ("core/generate/engine.py", _IN_ANY_ORDER): [
        ("a prompt that has moved is shared", ")\n                self._prompts.pop(sample.slot, None", ""),
        ("another sample's prompt is taken for one's own", "if held is shared), None)", "if held is not None), None)"),
    ],
    ("core/base/files.py", "core/saved/test_runs.py"): [
        ("two processes train in one directory", "kind | fcntl.LOCK_NB", "fcntl.LOCK_SH")
    ],
    ("core/saved/tensors.py", "core/saved/test_weightsfile.py"): [
        ("a header's checksum is not compared", "if HEADER_SUM in metadata and", "if not metadata and")
    ],
    ("parallel/sharded.py", _SUMMED): [
        ("shards are not shared", "self.comm.all_gather(self.model.params.flat, self._bounds)", "pass"),
        ("every rank clips by its own norm", "self.comm.sum(self._pieces)", "pass"),
        ("moments of other ranks are lost", "self._comm.all_gather(whole, [", "list(["),
    ],
    ("parallel/overlapped.py", _SUMMED): [
        ("a bucket leaves before it is computed", "self._between(partial(self._send, final))", "self._send(final)")
    ],
    ("parallel/overlapped.py", _OVERLAPPED): [("a bucket is summed twice", "self._sent = final", "self._sent = 0")],
    ("gpu/device.py", _OVERLAPPED): [("what comes between recorded parts is done once", "(), act", "(), lambda: None")],
    ("core/model/layers.py", "core/model/test_model.py -k gradients"): [
        ("a layer writes over what the weights of the last one read", "dout=self.din, din=self.dout", "dout=self.din")
    ],
    ("gpu/transport.py", _OVERLAPPED): [
        ("a bucket leaves a GPU before it is final", "self._device.after(self._second, self._device.stream)", "pass"),
        (
            "a step on a GPU does not wait for its buckets",
            "self._device.after(self._device.stream, self._second)",
            "pass",
        ),
    ],
    ("gpu/transport.py", "gpu/test_gradsync_gpu.py -k parts_are_summed"): [
        (
            "what the last part has more is not summed",
            "self._ranks.reduce(at, at, count, kind, total, rank, self._stream)",
            "pass",
        )
    ],
    ("parallel/reductions.py", _SUMMED): [
        ("ranks round alike", "{step} {self._comm.rank} {time}", "{step} {time}"),
        ("a stretch's own part stays rounded", "self._send(pieces, step)", "pass"),
    ],
    ("parallel/node_memory.py", f"{_SUMMED} -k way or overwrite"): [
        ("a node sums before all gradients are there", "self._node.barrier()  # all gradients are written", ""),
        (
            "the next step overwrites what other ranks still sum",
            "self._node.barrier()  # all sums are written, and none is read while the next pass writes",
            "",
        ),
        ("sums of nodes stay where they are", "self._over(bounds, sums.copy_rows, self._rows", "bool(sums"),
        (
            "sums in memory are in the order of ranks alone",
            "sums.add_rows, self._rows, self._by_twos",
            "sums.add_rows, self._rows, False",
        ),
    ],
    ("parallel/node_memory.py", _IN_MEMORY): [
        ("another process's file is taken for the node's", " (about.st_dev, about.st_ino) != file[1:]", " not about"),
        (
            "a rank that shares no memory is alone with it",
            "lacks = [text for text in gather(comm, lack) if text]",
            "lacks = [lack] if lack else []",
        ),
    ],
    ("parallel/loops/sums.py", f"{_SUMMED} -k way"): [
        ("a node's ranks are added from the last", "(1, rows.shape[0]", "(rows.shape[0] - 1, 0, -1")
    ],
    ("parallel/reductions.py", f"{_SUMMED} -k way"): [
        ("ranks add as they come", "sums.add_tree if by_twos else sums.add_parts", "sums.add_parts")
    ],
    ("core/model/model.py", "gpu/test_gradsync_gpu.py -k saves_and_resumes"): [
        (
            "a rank has other weights in full precision than it updates",
            "flat[start - begin : stop - begin]",
            "flat[: stop - start]",
        )
    ],
    ("parallel/reproducible.py", _SAME_BITS): [
        ("parts are added one by one", "level = ((part + 1) & -(part + 1))", "level = (1)"),
        ("units are rows of any rank", "rank * self.count + i, self._parts", "i, self._parts"),
    ],
    ("parallel/sharded.py", "gpu/test_gradsync_gpu.py -k saves_and_resumes"): [
        ("a checkpoint has weights that only other ranks have kept", "), **weights", ")")
    ],
    ("parallel/local_steps.py", _LOCAL): [
        ("every rank clips by its own norm in local steps", "both[len(extra) :]", "norm[:]"),
        ("the velocity is lost", "k.put(buffer.flat, flat)", "pass"),
        ("all ranks get one rank's moments", "if comm.rank == rank:", "if True:"),
        ("weights within a round are a sum", "total /= comm.size", "pass"),
    ],
    ("core/train/progress.py", _LOCAL): [
        ("a last round has no end", " or done == self.last", ""),
        ("what is due within a round is lost", "step // every > before // every", "not step % every"),
    ],
    ("core/cpu/fused/flat.py", _SUMMED): [("bfloat16 is rounded down", "builder.add(bits, up)", "bits")],
    ("core/cpu/fused/softmax.py", "core/cpu/test_cpu_attention.py"): [
        ("keys that come later count", "icmp ult <{n} x i64> {places}", "icmp ule <{n} x i64> {places}")
    ],
    ("gpu/cu/elementwise.cu", "gpu/test_cuda_kernels.py -k linear_act"): [
        ("a bias gradient leaves every second row out", "sum += out;", "if (!k) sum += out;")
    ],
    ("gpu/cu/attention.cu", "gpu/test_cuda_kernels.py -k test_attention"): [
        ("a bias gradient is of one sequence", "(long long)sequence * gridDim.y + blockIdx.y", "(long long)blockIdx.y")
    ],
    ("gpu/cu/common.cuh", "gpu/test_cuda_kernels.py -k adamw"): [
        ("a gradient that is not finite is used", "if (!(length - length == 0)) return", "if (false) return")
    ],
    ("inference/serving/app.py", "inference/test_serve.py"): [
        ("any key will do", "if not compare_digest(given.encode(), key.encode()):", "if not given:")
    ],
}
MUTATIONS = [Mutation(*where, *fault) for where, faults in _FAULTS.items() for fault in faults]
