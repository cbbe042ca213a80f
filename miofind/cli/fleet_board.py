"""How `miofind fleet status` shows a fleet."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from miofind.cli.output import Sheet, print_text, ratio_text, seconds_text
from miofind.device.device import device_text
from miofind.fleet.status import CampaignStatus, FleetStatus, GpuStatus
from miofind.fleet.values import JobState
from miofind.text.printable import printable

_CAMPAIGN = ("campaign", "device", "stack", *(state.value for state in JobState), "per minute", "ETA")
_CAMPAIGN_NUMBERS = (*(state.value for state in JobState), "per minute", "ETA")
_GPU = ("GPU", "host", "device", "state", "canary", "agent", "unmerged")
_MOST_FAILURES = 5


def print_status(status: FleetStatus) -> None:
    """Print tables of campaigns and devices, and the newest failures."""
    if not status.campaigns:
        print_text("no campaign was submitted yet: `miofind fleet submit` adds one")
    else:
        sheet = Sheet("", _CAMPAIGN, right=_CAMPAIGN_NUMBERS, spare=("stack",))
        for campaign in status.campaigns:
            sheet.add(*_campaign_cells(campaign), style="dim" if campaign.paused else "")
        sheet.print()
    if not status.gpus:
        print_text("", "no agent has come yet: start `miofind fleet worker` on the hosts")
    else:
        print_text("")
        sheet = Sheet("", _GPU, right=("canary", "unmerged"), spare=("unmerged",))
        for gpu in status.gpus:
            sheet.add(*_gpu_cells(gpu))
        sheet.print()
    print_text(*_failure_lines(status))


def shown_status(status: FleetStatus) -> RenderableType:
    """The same for a terminal that it is drawn on again and again."""
    campaigns = _table(_CAMPAIGN, _CAMPAIGN_NUMBERS)
    for campaign in status.campaigns:
        campaigns.add_row(*map(printable, _campaign_cells(campaign)))
    gpus = _table(_GPU, ("canary", "unmerged"))
    for gpu in status.gpus:
        gpus.add_row(*map(printable, _gpu_cells(gpu)))
    return Group(campaigns, Text(""), gpus, *map(Text, map(printable, _failure_lines(status))))


def _table(columns: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True, overflow="ellipsis")
    return table


def _campaign_cells(campaign: CampaignStatus) -> list[str]:
    name = f"{campaign.name} (paused)" if campaign.paused else campaign.name
    device = device_text(campaign.device) if campaign.device else "no agent yet"
    counts = [str(campaign.jobs[state]) for state in JobState]
    eta = "-" if campaign.eta_s is None else seconds_text(campaign.eta_s)
    return [name, device, campaign.stack, *counts, str(campaign.recent), eta]


def _gpu_cells(gpu: GpuStatus) -> list[str]:
    state = f"{gpu.state}: {gpu.reason}" if gpu.reason else gpu.state
    factor = "-" if gpu.factor is None else ratio_text(gpu.factor)
    silent = "" if gpu.silent_s is None or gpu.worker == "gone" else f", {seconds_text(gpu.silent_s)} ago"
    return [
        gpu.name,
        gpu.host,
        device_text(gpu.device),
        state,
        factor,
        f"{gpu.worker}{silent}",
        str(gpu.outbox_problems),
    ]


def _failure_lines(status: FleetStatus) -> list[str]:
    found = status.failures[:_MOST_FAILURES]
    lines = [f"{each.state}: {each.campaign} {each.network_config}: {each.message}" for each in found]
    return ["", *lines] if lines else []
