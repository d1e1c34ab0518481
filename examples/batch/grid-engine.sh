#!/bin/bash
# Train, and resume after each stop until all steps are done. Submit it with qsub, whose options
# override the lines below. `qconf -spl` lists the parallel environments that -pe may name.
# distgpt submit --system sge --ranks-per-node 2 --cpus-per-task 8 --time 12h --mpi openmpi --directive '-pe smp 16' -- train --preset gpt2 --data shards --batch-size 64 --out runs/grid-engine
#$ -N grid-engine
#$ -S /bin/bash
#$ -cwd
#$ -l h_rt=12:00:00
#$ -l s_rt=11:58:00
#$ -notify
#$ -r y
#$ -j y
#$ -o grid-engine-$JOB_ID.log
#$ -pe smp 16

# Add commands that this site requires before a program starts: module load …, export …

attempt=0
while [ -e "grid-engine-$JOB_ID.$attempt.log" ]; do attempt=$((attempt + 1)); done
log=grid-engine-$JOB_ID.$attempt.log
newest() { ls runs/grid-engine/checkpoints 2>/dev/null | tail -n 1; }
before=$(newest)

set -m  # mpiexec in its own process group: on a TERM meant for this shell it would kill the ranks
mpiexec -n 2 --map-by ppr:2:node --bind-to none \
  distgpt train --stage mpi --threads 8 --stall-abort 30m --preset gpt2 --data shards \
  --batch-size 64 --out runs/grid-engine --resume auto \
  >>"$log" 2>&1 &
ranks=$!

# On USR1, which this shell gets at s_rt, before the limit h_rt, every rank saves and exits. USR2 comes before
# qdel kills (-notify): the job saves and ends.
trap 'came=USR1; kill -USR1 $ranks' USR1
trap 'came=TERM; ending=yes; kill -USR1 $ranks' USR2 TERM
# wait returns after a signal, perhaps twice after two signals, and always while the ranks are stopped. The
# function keeps the shell in the loop after a TSTP.
ended() { wait $ranks; }
while came=; ended; code=$?; [ "$came" ] || kill -0 $ranks 2>/dev/null; do
  [ "$came" ] || sleep 0.2
done
echo "attempt $attempt exited with $code; newest checkpoint: $(newest)"

# 75 means "saved, restart"; Grid Engine requeues a job that exits with 99.
again=
if [ $code = 75 ] && [ "$(newest)" = "$before" ]; then
  echo "no step finished in this attempt: not requeued, to avoid an endless loop"
elif [ $code = 75 ]; then
  again=yes
fi
if [ "$again" ] && [ -z "$ending" ]; then
  exit 99
fi
exit $code
