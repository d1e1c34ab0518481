#!/bin/bash
# Train, and begin again where it stopped until all steps are done. Submit it with qsub. A successor has
# the options of these lines, and none of qsub's own: change them here.
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
# What this site needs before a program starts goes here: module load …, export …
module load cray-pals

number=${PBS_JOBID%%.*}
attempt=0
while [ -e "pals-$number.$attempt.log" ]; do attempt=$((attempt + 1)); done
log=pals-$number.$attempt.log
newest() { ls runs/pals/checkpoints 2>/dev/null | tail -n 1; }
before=$(newest)

set -m  # mpiexec in a process group of its own: on a TERM that is meant for this shell it would kill the ranks
mpiexec -n 8 --ppn 4 --depth=16 \
  distgpt train --stage mpi-cuda --stall-abort 30m --preset gpt2 --data shards \
  --batch-size 64 --out runs/pals --resume auto \
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
  marker=runs/pals/followed-"$number"
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
