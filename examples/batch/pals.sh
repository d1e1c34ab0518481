#!/bin/bash
# Train, and resume after each stop until all steps are done. Submit it with qsub. A successor
# has only the options of these lines, not those given to qsub: change them here.
# distgpt submit --system pbs --nodes 2 --ranks-per-node 4 --gpus-per-node 4 --cpus-per-task 16 --time 6h --mpi pals --setup 'module load cray-pals' --directive '-A project' -- train --preset gpt2 --data shards --batch-size 64 --out runs/pals
#PBS -N pals
#PBS -S /bin/bash
#PBS -l select=2:ncpus=64:mpiprocs=4:ompthreads=16:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=06:00:00
#PBS -r y
#PBS -j oe
#PBS -A project

cd "$PBS_O_WORKDIR" || exit
export DISTGPT_JOB_END=$(($(date +%s) + 21600))  # the limit above, in seconds since 1970
# Add commands that this site requires before a program starts: module load …, export …
module load cray-pals

number=${PBS_JOBID%%.*}
attempt=0
while [ -e "pals-$number.$attempt.log" ]; do attempt=$((attempt + 1)); done
log=pals-$number.$attempt.log
newest() { ls runs/pals/checkpoints 2>/dev/null | tail -n 1; }
before=$(newest)

set -m  # mpiexec in its own process group: on a TERM meant for this shell it would kill the ranks
mpiexec -n 8 --ppn 4 --depth=16 \
  distgpt train --stage mpi-cuda --stall-abort 30m --preset gpt2 --data shards \
  --batch-size 64 --out runs/pals --resume auto \
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
  marker=runs/pals/followed-"$number"
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
