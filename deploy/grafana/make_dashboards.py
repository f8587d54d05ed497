#!/usr/bin/env python3
"""Makes the dashboards of this folder, as JSON that Grafana 10 or later provisions.

  python3 -m pip install --no-deps --require-hashes --target DIR -r deploy/grafana/requirements.txt
  PYTHONPATH=DIR python3 deploy/grafana/make_dashboards.py [FOLDER]

A panel whose description begins with "Needs a GPU" has no data without one.
"""

import os
import sys
from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import GraphDrawStyle, LegendDisplayMode, LegendPlacement, StackingMode, VisibilityMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableRefresh

SOURCE = DataSourceRef(type_val="prometheus", uid="tandem-prometheus")
NEEDS_GPU = "Needs a GPU."
# What the driver counts to a process is known only where both see the same process ids.
NEEDS_GPU_PROCESSES = "Needs a GPU whose driver shares the daemons' PID namespace."


class Panel(NamedTuple):
    title: str
    unit: str
    queries: list  # (expression, legend); PAIR and JOB stand for the variables' matchers
    about: str = ""
    stacked: bool = False
    least: float | None = 0
    most: float | None = None


def pair(expression):
    return expression.replace("PAIR", 'pair="$pair"').replace("JOB", 'pair="$pair", job=~"$job"')


MEMORY = [
    ("Pool", [
        Panel("VRAM against the driver's figure", "bytes",
              [("tandem:region_bytes:by_region{PAIR}", "{{region}}"),
               ("max(tandem_rollout_captured_steps_bytes{PAIR})", "captured decode steps"),
               ('max(tandem_device_memory_bytes{PAIR, kind="outside_pool"}) - (max(tandem_rollout_captured_steps_bytes{PAIR}) or vector(0))',
                "contexts and modules"),
               ("tandem:device_used_bytes:max{PAIR}", "driver: used")],
              NEEDS_GPU + " Regions of the pool and what lies outside of it, stacked: decode steps kept as CUDA graphs, and the rest, other processes too; the line is what the driver calls used.", stacked=True),
        Panel("Pool by region", "bytes", [("tandem:region_bytes:by_region{PAIR}", "{{region}}")],
              "Without a GPU the pool is host memory.", stacked=True),
        Panel("Pool by owner and process", "bytes", [("tandem:memory_bytes:by_owner{PAIR}", "{{process}}: {{owner}}")],
              "Standing memory by owner; what both share is the pair's.", stacked=True),
        Panel("KV cache in the elastic region", "bytes", [('tandem_kv_cache_bytes{PAIR}', "{{kind}}")],
              "0 used while the trainer holds the region."),
        Panel("Who holds the elastic region", "none", [("tandem_lease_holder{PAIR, daemon=\"trainer_server\"}", "{{holder}}")], most=1),
        Panel("Changes of the lease a minute", "none", [("delta(tandem_lease_epoch{PAIR}[1m])", "{{daemon}}")]),
        Panel("Plan against use", "percentunit", [("tandem_plan_use_ratio{JOB}", "{{job}}: {{owner}}")],
              "The most in use since the job began, over what its plan has."),
        Panel("Memory of each process by the driver", "bytes", [("tandem_device_process_memory_bytes{PAIR}", "{{daemon}}")],
              NEEDS_GPU_PROCESSES),
    ]),
    ("Node", [
        Panel("Host memory of the daemons", "bytes", [('tandem_process_memory_bytes{PAIR, kind="resident"}', "{{daemon}}")]),
        Panel("Host memory", "bytes", [('max by (kind) (tandem_host_memory_bytes{PAIR})', "{{kind}}")]),
        Panel("Disk", "percentunit", [("tandem:disk_available:ratio{PAIR}", "{{daemon}}: available")], most=1),
        Panel("Processor time", "short", [("rate(tandem_process_cpu_seconds_total{PAIR}[$__rate_interval])", "{{daemon}}")],
              "Processors in use."),
        Panel("GPU load", "percentunit", [("max(tandem_gpu_busy_ratio{PAIR})", "busy")], NEEDS_GPU, most=1),
        Panel("GPU power", "watt", [("max(tandem_gpu_power_watts{PAIR})", "power")], NEEDS_GPU),
        Panel("GPU temperature", "celsius", [("max(tandem_gpu_temperature_celsius{PAIR})", "temperature")], NEEDS_GPU),
        Panel("GPU clock", "hertz", [("max(tandem_gpu_clock_hertz{PAIR})", "multiprocessors")], NEEDS_GPU),
    ]),
]

LEARNING = [
    ("Reward", [
        Panel("Reward", "none", [("tandem_train_reward{JOB}", "{{job}}: step"), ("tandem_train_evaluation_reward{JOB}", "{{job}}: held-out")],
              least=None),
        Panel("Reward by function", "none", [("tandem_train_rewards_mean{JOB}", "{{job}}: {{function}}")], least=None),
        Panel("Spread of the reward", "none", [("tandem_train_rewards_std{JOB}", "{{job}}: {{function}}"), ("tandem_train_reward_std{JOB}", "{{job}}: all")]),
        Panel("Advantages", "none", [("tandem_train_advantages_min{JOB}", "{{job}}: least"), ("tandem_train_advantages_max{JOB}", "{{job}}: largest"),
                                     ("tandem_train_advantages_std{JOB}", "{{job}}: spread")], least=None),
        Panel("Groups without variance", "percentunit", [("tandem_train_frac_reward_zero_std{JOB}", "{{job}}")], "They teach nothing.", most=1),
        Panel("pass@k, held-out", "percentunit", [("tandem_train_evaluation_pass_at{JOB}", "{{job}}: k = {{k}}")], most=1),
        Panel("Completion length", "none", [("tandem_train_completions_mean_length{JOB}", "{{job}}: mean"),
                                            ("tandem_train_completions_max_length{JOB}", "{{job}}: longest")], "Tokens."),
        Panel("Truncated completions", "percentunit", [("tandem_train_completions_clipped_ratio{JOB}", "{{job}}")], most=1),
    ]),
    ("Update", [
        Panel("KL to the reference", "none", [("tandem_train_kl{JOB}", "{{job}}")], "Nats a token; jobs with beta above 0.", least=None),
        Panel("Entropy", "none", [("tandem_train_entropy{JOB}", "{{job}}")], "Nats a token."),
        Panel("Clipped ratios", "percentunit", [("tandem_train_clip_ratio_low_mean{JOB}", "{{job}}: low"),
                                                ("tandem_train_clip_ratio_high_mean{JOB}", "{{job}}: high")]),
        Panel("Gradient norm", "none", [("tandem_train_grad_norm{JOB}", "{{job}}")], "Before clipping."),
        Panel("Learning rate", "sci", [("tandem_train_learning_rate{JOB}", "{{job}}")]),
        Panel("Log-prob gap of the two sides", "none", [("tandem_train_sampling_sampling_logp_difference_mean{JOB}", "{{job}}: mean"),
                                                        ("tandem_train_sampling_sampling_logp_difference_max{JOB}", "{{job}}: largest")],
              "Absolute difference of the two daemons' log-probs of one token, nats."),
        Panel("Staleness", "none", [("tandem_train_staleness{JOB}", "{{job}}")], "Updates between a completion's drawing and its last use."),
        Panel("Loss", "none", [("tandem_train_loss{JOB}", "{{job}}")], least=None),
    ]),
    ("Time", [
        Panel("Step time", "s", [("tandem_train_rollout_seconds{JOB}", "{{job}}: rollout"), ("tandem_train_reward_seconds{JOB}", "{{job}}: reward"),
                                 ("tandem_train_train_seconds{JOB}", "{{job}}: training"), ("tandem_train_publish_seconds{JOB}", "{{job}}: publish")],
              stacked=True),
        Panel("Training phase by stage", "s", [("tandem_train_phase_wait_seconds{JOB}", "{{job}}: wait"), ("tandem_train_score_seconds{JOB}", "{{job}}: score"),
                                               ("tandem_train_forward_seconds{JOB}", "{{job}}: forward"),
                                               ("tandem_train_backward_seconds{JOB}", "{{job}}: backward"),
                                               ("tandem_train_optimizer_seconds{JOB}", "{{job}}: optimizer")], stacked=True),
        Panel("Tokens a second", "none", [("tandem_train_rollout_tokens_per_second{JOB}", "{{job}}: drawn"),
                                          ("tandem_train_train_tokens_per_second{JOB}", "{{job}}: trained")]),
        Panel("FLOP a second", "none", [("tandem_train_train_flops_per_second{JOB}", "{{job}}")], "Useful ones of forward and backward passes."),
        Panel("FLOP utilisation", "percentunit", [("tandem_train_flops_utilization_ratio{JOB}", "{{job}}")],
              NEEDS_GPU + " Useful FLOP a second over the GPU's peak in bf16.", most=1),
        Panel("Progress", "percentunit", [("tandem_train_step{JOB} / tandem_train_num_steps{JOB}", "{{job}}")], most=1),
        Panel("Phase", "none", [("tandem_phase{PAIR}", "{{phase}}")], most=1),
        Panel("Checkpoint age", "s", [("tandem:train_checkpoint_age_seconds:max{JOB}", "{{job}}")]),
    ]),
]

SERVING = [
    ("Load", [
        Panel("Tokens a second", "none", [("tandem:generation_tokens:rate1m{PAIR}", "drawn"), ("tandem:prompt_tokens:rate1m{PAIR}", "prompts")]),
        Panel("Sequences", "none", [("tandem_num_requests_running{PAIR}", "running"), ("tandem_num_requests_waiting{PAIR}", "waiting")]),
        Panel("Queue", "percentunit", [("tandem:request_queue:ratio{PAIR}", "full")], most=1),
        Panel("KV cache", "percentunit", [("tandem_kv_cache_usage_perc{PAIR}", "in use")], most=1),
        Panel("Prefix cache", "percentunit", [("tandem:prefix_cache_hits:ratio_rate5m{PAIR}", "hits")], "Share of prompt tokens found.", most=1),
        Panel("Preemptions", "none", [("rate(tandem_num_preemptions_total{PAIR}[$__rate_interval])", "a second")]),
        Panel("Ended completions", "none", [("rate(tandem_request_success_total{PAIR}[$__rate_interval])", "{{finished_reason}}")], "A second."),
        Panel("Paused for training", "none", [("tandem_rollout_paused{PAIR}", "paused")], most=1),
    ]),
    ("Latency", [
        Panel("Time to first token", "s", [("tandem:time_to_first_token_seconds:p50_5m{PAIR}", "median"),
                                           ("tandem:time_to_first_token_seconds:p99_5m{PAIR}", "99th percentile")]),
        Panel("Time per token", "s", [("tandem:inter_token_latency_seconds:p50_5m{PAIR}", "median"),
                                      ("tandem:inter_token_latency_seconds:p99_5m{PAIR}", "99th percentile")]),
        Panel("Engine step", "s", [("histogram_quantile(0.5, sum by (lane, le) (rate(tandem_rollout_step_duration_seconds_bucket{PAIR}[$__rate_interval])))",
                                    "{{lane}}: median")], "unit: a training step's rollouts; shared: everything else."),
        Panel("Engine step by stage", "percentunit", [("rate(tandem_rollout_stage_seconds_total{PAIR}[$__rate_interval])", "{{stage}}")],
              "Share of the engine thread's time. On a GPU model is handing a step over, and sample waits for it.", stacked=True),
        Panel("Tokens of engine steps", "none", [("rate(tandem_rollout_step_tokens_total{PAIR}[$__rate_interval])", "{{lane}}")],
              "A second; prompts and recomputation included."),
        Panel("Weight version", "none", [("tandem_rollout_weight_version{JOB}", "{{job}}")]),
        Panel("Commands waiting for the engine", "none", [("tandem_rollout_queued_commands{PAIR}", "commands")]),
        Panel("Sequences with bad logits", "none", [("tandem_rollout_bad_logits_total{PAIR}", "NaN or infinite")]),
    ]),
]


def build_panel(panel, number):
    builder = (timeseries.Panel().id(number).title(panel.title).unit(panel.unit).datasource(SOURCE).height(8).span(6).line_width(1)
               .show_points(VisibilityMode.NEVER).draw_style(GraphDrawStyle.LINE)
               .legend(common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)))
    if panel.about:
        builder.description(panel.about)
    if panel.least is not None:
        builder.min(panel.least)
    if panel.most is not None:
        builder.max(panel.most)
    if panel.stacked:
        builder.fill_opacity(40).stacking(common.StackingConfig().group("A").mode(StackingMode.NORMAL))
        # The driver's figure is compared with the stack.
        builder.override_by_regexp("/^driver:/", [{"id": "custom.stacking", "value": {"mode": "none", "group": "A"}},
                                                 {"id": "custom.fillOpacity", "value": 0}, {"id": "custom.lineWidth", "value": 2}])
    for index, (expression, legend) in enumerate(panel.queries):
        builder.with_target(prometheus.Dataquery().expr(pair(expression)).legend_format(legend).ref_id(chr(ord("A") + index)).range())
    return builder


def variable(name, label, query, takes_many):
    builder = (dashboard.QueryVariable(name).label(label).datasource(SOURCE).query(query).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED))
    return builder.multi(True).include_all(True).all_value(".*") if takes_many else builder


def build(uid, title, rows):
    builder = (dashboard.Dashboard(title).uid(uid).tags(["tandem"]).timezone("browser").readonly().refresh("10s").time("now-1h", "now")
               .tooltip(DashboardCursorSync.CROSSHAIR)
               .with_variable(variable("pair", "Pair", 'label_values(up{job="tandem"}, pair)', takes_many=False))
               .with_variable(variable("job", "Job", 'label_values(tandem_train_running{pair="$pair"}, job)', takes_many=True)))
    number = 0
    for row, panels in rows:
        number += 1
        builder.with_row(dashboard.Row(row).id(number))
        for panel in panels:
            number += 1
            builder.with_panel(build_panel(panel, number))
    return builder.build()


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "dashboards")
    for name, title, rows in (("memory", "Tandem: memory", MEMORY), ("learning", "Tandem: learning", LEARNING), ("serving", "Tandem: serving", SERVING)):
        with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as file:
            file.write(JSONEncoder(sort_keys=True, indent=2).encode(build("tandem-" + name, title, rows)) + "\n")


main()
