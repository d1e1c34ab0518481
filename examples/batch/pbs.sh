#!/bin/bash
# Train, and resume after each stop until all steps are done. Submit it with qsub. A successor
# has only the options of these lines, not those given to qsub: change them here.
# distgpt submit --system pbs --nodes 2 --node 8x16 --exclusive --memory 240G --time 12h --mpi mpich --directive '-q workq' -- train --preset gpt2 --data shards --batch-size 64 --out runs/pbs
#PBS -N pbs
#PBS -S /bin/bash
#PBS -l select=2:ncpus=128:mpiprocs=8:ompthreads=16:mem=240gb
#PBS -l place=scatter:excl
#PBS -l walltime=12:00:00
#PBS -r y
#PBS -j oe
#PBS -q workq

cd "$PBS_O_WORKDIR" || exit
export DISTGPT_JOB_END=$(($(date +%s) + 43200))  # the limit above, in seconds since 1970
# Add commands that this site requires before a program starts: module load …, export …

number=${PBS_JOBID%%.*}
attempt=0
while [ -e "pbs-$number.$attempt.log" ]; do attempt=$((attempt + 1)); done
log=pbs-$number.$attempt.log
newest() { ls runs/pbs/checkpoints 2>/dev/null | tail -n 1; }
before=$(newest)

set -m  # mpiexec in its own process group: on a TERM meant for this shell it would kill the ranks
mpiexec -n 16 -ppn 8 -bind-to core:16 \
  distgpt train --stage mpi --threads 16 --stall-abort 30m --preset gpt2 --data shards \
  --batch-size 64 --out runs/pbs --resume auto \
  >>"$log" 2>&1 &
ranks=$!

# On USR1 every rank saves and exits. PBS sends no signal before its limit, which the run reads from
# DISTGPT_JOB_END. TERM comes before qdel kills: the job saves and ends, or restarts after a preemption.
trap 'came=USR1; kill -USR1 $ranks' USR1
trap 'came=TERM; ending=yes; kill -USR1 $ranks' TERM
# wait returns after a signal, perhaps twice after two signals, and always while the ranks are stopped. The
# function keeps the shell in the loop after a TSTP.
ended() { wait $ranks; }
while came=; ended; code=$?; [ "$came" ] || kill -0 $ranks 2>/dev/null; do
  [ "$came" ] || sleep 0.2
done
echo "attempt $attempt exited with $code; newest checkpoint: $(newest)"

# 75 means "saved, restart".
again=
if [ $code = 75 ] && [ "$(newest)" = "$before" ]; then
  echo "no step finished in this attempt: not requeued, to avoid an endless loop"
elif [ $code = 75 ]; then
  again=yes
fi
if [ "$again" ] && [ -z "$ending" ]; then
  marker=runs/pbs/followed-"$number"
  if mkdir "$marker" 2>/dev/null; then
    qsub "$0" && exit 0
    echo "cannot submit the successor: submit the script again"
  elif [ -d "$marker" ]; then
    echo "$marker exists: this job has already submitted its successor"
  else
    echo "cannot create $marker, so no successor was submitted: submit the script again"
  fi
fi
exit $code
