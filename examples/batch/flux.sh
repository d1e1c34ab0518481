#!/bin/bash
# Train, and begin again where it stopped until all steps are done. Submit it with flux batch. Of an array
# each element is submitted alone: flux batch --env=ELEMENT=1 SCRIPT.
# distgpt submit --system flux --nodes 2 --node 8x16 --time 12h --mpi simple --directive --queue=batch -- train --preset gpt2 --data shards --batch-size 64 --out runs/flux
# flux: --job-name=flux
# flux: --nodes=2
# flux: --nslots=2
# flux: --cores-per-slot=128
# flux: --time-limit=43200s
# flux: --output=flux-{{id.f58plain}}.log
# flux: --queue=batch

# What this site needs before a program starts goes here: module load …, export …

# In seconds since 1970: the limit above, less what it takes to submit a successor.
export DISTGPT_JOB_END=$(($(date +%s) + $(flux job timeleft) - 20))
number=$(flux job id --to=f58plain "$(flux getattr jobid)")
attempt=0
while [ -e "flux-$number.$attempt.log" ]; do attempt=$((attempt + 1)); done
log=flux-$number.$attempt.log
newest() { ls runs/flux/checkpoints 2>/dev/null | tail -n 1; }
before=$(newest)

set -m  # flux in a process group of its own: on a TERM that is meant for this shell it would kill the ranks
flux run --nodes=2 --ntasks=16 --cores-per-task=16 \
  -o cpu-affinity=per-task -o pmi=simple \
  distgpt train --stage mpi --threads 16 --stall-abort 30m --preset gpt2 --data shards \
  --batch-size 64 --out runs/flux --resume auto \
  >>"$log" 2>&1 &
ranks=$!

# Every rank saves and leaves on USR1. The run knows the time limit by DISTGPT_JOB_END. TERM and HUP come
# 5 seconds before `flux cancel` kills: the job saves and ends.
trap 'came=USR1; flux job kill -s USR1 $(flux job last)' USR1
trap 'came=TERM; ending=yes; flux job kill -s USR1 $(flux job last)' TERM HUP
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
  marker=runs/flux/followed-"$number"
  if mkdir "$marker" 2>/dev/null; then
    flux --parent batch "$0" && exit 0
    echo "the successor could not be submitted: submit the script again"
  elif [ -d "$marker" ]; then
    echo "$marker is there: this job has submitted its successor already"
  else
    echo "$marker cannot be made, so no successor follows: submit the script again"
  fi
fi
exit $code
