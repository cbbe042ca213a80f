"""`miofind fleet up`: agents by ssh, SLURM or Kubernetes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from miofind.cli.fleet_session import fleet_command, opened
from miofind.cli.options import InputFile
from miofind.cli.output import print_json, print_text
from miofind.fleet.launchers import kubernetes_manifest, read_hosts, slurm_script, start_by_ssh, stop_by_ssh
from miofind.text.printable import printable


@fleet_command(
    "up",
    "miofind fleet up --ssh hosts.txt",
    "miofind fleet up --slurm --nodes 16 --gpus-per-node 8 | sbatch",
    "miofind fleet up --kubernetes --image registry.example/miofind:0.1.0 | kubectl apply -f -",
)
@click.option(
    "--ssh", "hosts_file", metavar="HOSTFILE", type=InputFile(), help="Start an agent on each host that the file names."
)
@click.option("--slurm", is_flag=True, help="Print a job script for sbatch.")
@click.option("--kubernetes", is_flag=True, help="Print a manifest for kubectl; the URL is in a secret of its own.")
@click.option("--stop", is_flag=True, help="With --ssh: drain the agents.")
@click.option("--device", metavar="DEVICE", help="What agents measure with, such as cpu.  [default: all GPUs]")
@click.option("--program", default="miofind", show_default=True, metavar="PATH", help="For ssh: miofind on the hosts.")
@click.option("--nodes", type=click.IntRange(1, 10_000), default=1, show_default=True, help="For SLURM.")
@click.option("--gpus-per-node", "gpus", type=click.IntRange(1, 64), default=8, show_default=True, help="Of a node.")
@click.option("--hours", type=click.IntRange(1, 1000), default=4, show_default=True, help="For SLURM: of each agent.")
@click.option("--image", default="registry.example/miofind", show_default=True, help="For Kubernetes: with miofind.")
def up(
    url: str,
    hosts_file: Path | None,
    slurm: bool,
    kubernetes: bool,
    stop: bool,
    device: str | None,
    program: str,
    nodes: int,
    gpus: int,
    hours: int,
    image: str,
    as_json: bool,
) -> None:
    """Start agents over ssh, SLURM or Kubernetes.

    For SLURM and Kubernetes a text is printed that starts them. Over ssh each host has miofind in its PATH, ssh lets
    one in without a question, and agents go on when the command has ended: `--stop` drains them. The password is in
    each host's ~/.pgpass.
    """
    if sum((hosts_file is not None, slurm, kubernetes)) != 1 or (stop and hosts_file is None):
        raise click.UsageError("name one of --ssh HOSTFILE, --slurm and --kubernetes; --stop goes with --ssh")
    where = ("--device", device) if device is not None else ("--gpus", "all")
    if hosts_file is None:
        text = (
            slurm_script(url, where, nodes=nodes, gpus=gpus, hours=hours)
            if slurm
            else kubernetes_manifest(where, image=image, gpus=gpus)
        )
        if as_json:
            print_json({"text": text})
        else:
            click.echo(text, nl=False)
        return
    hosts = read_hosts(hosts_file)
    if not stop:
        with opened(url):  # what is wrong with the server is told once
            pass
    told = stop_by_ssh(hosts) if stop else start_by_ssh(hosts, url, where, program)
    if as_json:
        print_json({"hosts": [asdict(each) for each in told]})
    else:
        print_text(*(f"{each.host}: {printable(each.message, 300)}" for each in told))
    raise click.exceptions.Exit(int(not all(each.is_good for each in told)))
