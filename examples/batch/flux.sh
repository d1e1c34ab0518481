#!/bin/bash
# Train, and resume after each stop until all steps are done. Submit it with flux batch. Submit
# each element of an array separately: flux batch --env=ELEMENT=1 SCRIPT.
# distgpt submit --system flux --nodes 2 --node 8x16 --time 12h --mpi simple --directive --queue=batch -- train --preset gpt2 --data shards --batch-size 64 --out runs/flux
# flux: --job-name=flux
# flux: --nodes=2
# flux: --nslots=2
# flux: --cores-per-slot=128
# flux: --time-limit=43200s
# flux: --output=flux-{{id.f58plain}}.log
# flux: --queue=batch

# Add commands that this site requires before a program starts: module load …, export …

# In seconds since 1970: the limit above, minus the time to submit a successor.
export DISTGPT_JOB_END=$(($(date +%s) + $(flux job timeleft) - 20))
number=$(flux job id --to=f58plain "$(flux getattr jobid)")
attempt=0
while [ -e "flux-$number.$attempt.log" ]; do attempt=$((attempt + 1)); done
log=flux-$number.$attempt.log
newest() { ls runs/flux/checkpoints 2>/dev/null | tail -n 1; }
before=$(newest)

set -m  # flux in its own process group: on a TERM meant for this shell it would kill the ranks
flux run --nodes=2 --ntasks=16 --cores-per-task=16 \
  -o cpu-affinity=per-task -o pmi=simple \
  distgpt train --stage mpi --threads 16 --stall-abort 30m --preset gpt2 --data shards \
  --batch-size 64 --out runs/flux --resume auto \
  >>"$log" 2>&1 &
ranks=$!

# On USR1 every rank saves and exits. The run reads the time limit from DISTGPT_JOB_END. TERM and HUP come
# 5 seconds before `flux cancel` kills: the job saves and ends.
trap 'came=USR1; flux job kill -s USR1 $(flux job last)' USR1
trap 'came=TERM; ending=yes; flux job kill -s USR1 $(flux job last)' TERM HUP
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
  marker=runs/flux/followed-"$number"
  if mkdir "$marker" 2>/dev/null; then
    flux --parent batch "$0" && exit 0
    echo "cannot submit the successor: submit the script again"
  elif [ -d "$marker" ]; then
    echo "$marker exists: this job has already submitted its successor"
  else
    echo "cannot create $marker, so no successor was submitted: submit the script again"
  fi
fi
exit $code
