"""A script that starts a job on hosts by ssh, one `forge fit --nproc` on each, and passes signals on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from forge.errors import ForgeError, Interrupted
from forge_cluster.launching.job import LaunchJob, of_printable_lines

HOST = re.compile(r"(\w[\w.-]*@)?\w[\w.:-]*", re.ASCII)
"""A name or an address, which means the same to every shell without quotes."""
SCRIPT = """\
#!/bin/bash
# Start the same command on every host; the first one holds the rendezvous. TERM, INT and USR1 are passed on: all ranks
# save and exit with {code}, and so does this script. The same script again continues the run.
hosts=({hosts})
folder={pids}
work={folder}
command={command}

on() {{ ssh -o BatchMode=yes "$1" "$2"; }}
pass_on() {{
  for host in "${{hosts[@]}}"; do
    on "$host" "kill -$1 \\$(cat $folder/$host.pid)" &
  done
}}
for name in TERM INT USR1; do
  trap "pass_on $name" "$name"
done

pids=()
number=0
for host in "${{hosts[@]}}"; do
  start="exec env FORGE_NODE_RANK=$number $command"
  on "$host" "mkdir -p $folder && cd $work && echo \\$\\$ > $folder/$host.pid && $start" < /dev/null &
  pids+=($!)
  number=$((number + 1))
done

result=0
for pid in "${{pids[@]}}"; do
  while true; do  # a signal ends a wait, not the process
    wait "$pid"; code=$?
    kill -0 "$pid" 2> /dev/null || break
  done
  if [ "$code" -ne 0 ] && [ "$result" -ne {code} ]; then result=$code; fi
done
exit $result
"""


@of_printable_lines
def ssh_script(job: LaunchJob, hosts: Sequence[str]) -> str:
    """Return the script. The hosts share the run folder, and the working directory with its Python."""
    if job.sweep:
        raise ForgeError("--array is for SLURM. By ssh, launch one job for each value.")
    if len(hosts) != job.nodes:
        raise ForgeError(f"--hosts names {len(hosts)} hosts, but --nodes is {job.nodes}: leave --nodes out.")
    for host in hosts:
        if not HOST.fullmatch(host):
            raise ForgeError(f"--hosts: {host!r} is no name of a host, nor user@host.")
    first = hosts[0].rpartition("@")[2]
    return SCRIPT.format(
        hosts=" ".join(hosts),
        pids=shlex.quote(shlex.quote(f"{job.run_dir}/.ssh-launch")),
        folder=shlex.quote(shlex.quote(job.folder)),
        command=shlex.quote(job.with_env(job.node_command(first))),
        code=Interrupted.EXIT_CODE,
    )
