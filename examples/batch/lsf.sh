#!/bin/bash
# Train, and resume after each stop until all steps are done. Submit it with bsub < SCRIPT, whose options
# override the lines below.
# distgpt submit --system lsf --nodes 2 --ranks-per-node 4 --cpus-per-task 8 --time 12h --mpi openmpi --array 1-4%2 -- train --preset gpt2 --data shards --batch-size 64 --seed '$ELEMENT' --out runs/lsf
#BSUB -J "lsf[1-4]%2"
#BSUB -n 64
#BSUB -R "span[ptile=32]"
#BSUB -W 12:00
#BSUB -wa URG
#BSUB -wt 00:02
#BSUB -Q "99"
#BSUB -r
#BSUB -o lsf-%J.%I.log

# Add commands that this site requires before a program starts: module load …, export …

attempt=0
while [ -e "lsf-$LSB_JOBID.$LSB_JOBINDEX.$attempt.log" ]; do attempt=$((attempt + 1)); done
log=lsf-$LSB_JOBID.$LSB_JOBINDEX.$attempt.log
newest() { ls runs/lsf/"$LSB_JOBINDEX"/checkpoints 2>/dev/null | tail -n 1; }
asked=
trap '' USR2  # also sent to mpiexec, and might end it
# Seconds for the ranks to save after bkill, in the spelling of Open MPI 4 and of Open MPI 5.
export OMPI_MCA_odls_base_sigkill_timeout=10 PRTE_MCA_odls_base_sigkill_timeout=10
before=$(newest)

set -m  # mpiexec in its own process group: on a TERM meant for this shell it would kill the ranks
mpiexec -n 8 --map-by ppr:4:node --bind-to none ${LSB_DJOB_HOSTFILE:+--hostfile "$LSB_DJOB_HOSTFILE"} \
  distgpt train --stage mpi --threads 8 --stall-abort 30m --preset gpt2 --data shards \
  --batch-size 64 --seed "$LSB_JOBINDEX" --out runs/lsf/"$LSB_JOBINDEX" --resume auto \
  >>"$log" 2>&1 &
ranks=$!

# On USR1 every rank saves and exits. LSF sends URG before the limit (-wa, -wt), which only this shell
# handles, and USR2 at the limit. INT and TERM come before bkill kills: the job saves and ends. A second USR1
# would end the save.
trap 'came=USR1; [ "$asked" ] || kill -USR1 $ranks; asked=yes' URG USR1 USR2
trap 'came=TERM; ending=yes; [ "$asked" ] || kill -USR1 $ranks; asked=yes' INT TERM
# wait returns after a signal, perhaps twice after two signals, and always while the ranks are stopped. The
# function keeps the shell in the loop after a TSTP.
ended() { wait $ranks; }
while came=; ended; code=$?; [ "$came" ] || kill -0 $ranks 2>/dev/null; do
  [ "$came" ] || sleep 0.2
done
echo "attempt $attempt exited with $code; newest checkpoint: $(newest)"

# 75 means "saved, restart"; LSF requeues a job that exits with 99 (-Q).
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
