#!/bin/bash
# Train, and begin again where it stopped until all steps are done. Submit it with qsub. A successor has
# the options of these lines, and none of qsub's own: change them here.
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
# What this site needs before a program starts goes here: module load …, export …

number=${PBS_JOBID%%.*}
attempt=0
while [ -e "pbs-$number.$attempt.log" ]; do attempt=$((attempt + 1)); done
log=pbs-$number.$attempt.log
newest() { ls runs/pbs/checkpoints 2>/dev/null | tail -n 1; }
before=$(newest)

set -m  # mpiexec in a process group of its own: on a TERM that is meant for this shell it would kill the ranks
mpiexec -n 16 -ppn 8 -bind-to core:16 \
  distgpt train --stage mpi --threads 16 --stall-abort 30m --preset gpt2 --data shards \
  --batch-size 64 --out runs/pbs --resume auto \
  >>"$log" 2>&1 &
ranks=$!

# Every rank saves and leaves on USR1. PBS sends none before its limit: the run knows that by DISTGPT_JOB_END.
# TERM comes before qdel kills: the job saves and ends, or PBS starts it again after a preemption.
trap 'came=USR1; kill -USR1 $ranks' USR1
trap 'came=TERM; ending=yes; kill -USR1 $ranks' TERM
# wait comes back for a signal, after two at once perhaps twice, and always while the ranks are stopped: of a
# TSTP the shell would leave the loop, too, were it not for the function.
ended() { wait $ranks; }
while came=; ended; code=$?; [ "$came" ] || kill -0 $ranks 2>/dev/null; do
  [ "$came" ] || sleep 0.2
done
echo "attempt $attempt left with $code; newest checkpoint: $(newest)"

# 75 is "saved, start me again".
again=
if [ $code = 75 ] && [ "$(newest)" = "$before" ]; then
  echo "no step was finished in this attempt: not queued again, as that might never end"
elif [ $code = 75 ]; then
  again=yes
fi
if [ "$again" ] && [ -z "$ending" ]; then
  marker=runs/pbs/followed-"$number"
  if mkdir "$marker" 2>/dev/null; then
    qsub "$0" && exit 0
    echo "the successor could not be submitted: submit the script again"
  elif [ -d "$marker" ]; then
    echo "$marker is there: this job has submitted its successor already"
  else
    echo "$marker cannot be made, so no successor follows: submit the script again"
  fi
fi
exit $code
