"""What each series that is derived from the history means; see also `groups.DESCRIBED`."""

from __future__ import annotations

from typing import Final

from verl_logsync.diagnostics.groups import Described

_GRPO: Final = "adv_estimator grpo with norm_adv_by_std_in_grpo, rollout.n"
_SUM_ZERO: Final = (
    "GRPO (configuration, or returns = advantages), no filter_groups, KL in reward, masks or"
    " several turns"
)

_FIT: Final = "50 rows with both, an entropy that fell by 20 %, a > 0, and R^2 of 0.5 at least"

DESCRIBED: Final[tuple[Described, ...]] = (
    Described(
        "actor/loss",
        "actor/loss; actor/pg_loss + actor/kl_coef * actor/kl_loss - entropy_coeff * entropy;"
        " actor/pg_loss; train/loss",
        "any of them",
        "settles; near 0 on-policy; not comparable across verl 0.5, 0.6, 0.7 and 0.8",
        "verl issues 3129, 4711, 5766, 4778; one article says 0.05-0.3",
    ),
    Described(
        "reward/mean",
        "critic/rewards/mean; critic/score/mean; mean score of the rollout dump",
        "any of them",
        "rising",
        "one article: GSM8K above 0.75",
        "reward",
    ),
    Described(
        "kl_divergence",
        "actor/kl_loss where actor/kl_coef is logged; actor/reward_kl_penalty; critic/kl",
        "use_kl_loss or use_kl_in_reward",
        "no sudden rise against the run's own median; the level depends on estimator and version",
        "DeepSeekMath arXiv 2402.03300; Schulman's note on k1, k2, k3",
        "nats",
    ),
    Described(
        "actor/entropy",
        "actor/entropy_loss of verl up to 0.4.0",
        "it",
        "no universal floor; not below 15 % of its start",
        "arXiv 2505.22617",
        "nats",
    ),
    Described(
        "rollout/latency_ms",
        "1000 * timing_s/gen / N; N = train_batch_size * rollout.n, else rows of the dump, else"
        " from tokens; DAPO: N = num_gen_batches * gen_batch_size * rollout.n",
        "generation and training in turn",
        "no doubling against the run's own past",
        "one article: 120 ms for 8B on A100, above 500 slow",
        "ms per sequence, amortised",
    ),
    Described(
        "rollout/sequence_latency_ms",
        "1000 * timing_s/agent_loop/generate_sequences/mean;"
        " 1000 * fully_async/processing_time/avg",
        "agent loop of the v0 trainer, or fully-async",
        "no doubling against the run's own past",
        "rule",
        "ms per trajectory",
    ),
    Described(
        "trainer/step_per_second",
        "1 / (timing_s/step - what the version counts in of testing, save_checkpoint and"
        " dump_rollout_generations); 1 / perf/time_per_step",
        "any of them",
        "no halving against the run's own past",
        "verl issue 3116; one article: 1.8 for 8B on 8 A100",
        "steps/s",
    ),
    Described(
        "hybrid_engine/gpu_mem_util",
        "max_memory_reserved_gb / device memory; GPU records of an offline run",
        "--device-memory-gb, or GPU records",
        "0.65-0.85; above 0.9 nearly full",
        "one article",
    ),
    Described(
        "hybrid_engine/gpu_mem_allocated_gb",
        "actor/perf/max_memory_allocated_gb; perf/max_memory_allocated_gb",
        "verl 0.3 or later",
        "settles early",
        "rule",
        "GiB",
    ),
    Described(
        "rollout/truncation_ratio",
        "response_length/clip_ratio; 0 where response_length/max < max_response_length; v1, and"
        " logs that show a ratio above 0 at two lengths: only where the two are equal",
        "v1: data.max_response_length",
        "< 0.05 (rule)",
        "DAPO arXiv 2503.14476; verl issues 7817, 7823",
    ),
    Described("train/lr", "train/lr(1e-3) / 1000", "fsdp_sft_trainer", "", "verl issue 119"),
    Described(
        "grpo/zero_spread_share_exact",
        "1 - variance_proxy/expected_a_squared * n / (n - 1)",
        f"calculate_sum_pi_squared; {_GRPO}",
        "< 0.5 (rule)",
        "derivation: a group with spread has mean A^2 = (n - 1) / n",
    ),
    Described(
        "grpo/no_advantage",
        "1 if critic/advantages/max = critic/advantages/min = 0, else 0",
        "critic/advantages/*",
        "0",
        "derivation; seen in a public log",
    ),
    Described(
        "grpo/length_advantage_covariance",
        "critic/advantages/mean * response_length/mean",
        _SUM_ZERO,
        "negative: low-reward answers are longer; a change of sign is a turning point",
        "derivation: advantages add up to 0 in a group, and the logged mean is over tokens",
        "tokens",
    ),
    Described(
        "grpo/length_advantage_shift",
        "grpo/length_advantage_covariance / response_length/mean",
        _SUM_ZERO,
        "not above 0.05 while responses grow (rule)",
        "derivation",
    ),
    Described(
        "grpo/advantage_asymmetry",
        "critic/advantages/max + critic/advantages/min",
        "GRPO",
        "above 0: rare successes, below 0: rare failures",
        "derivation",
    ),
    Described(
        "grpo/advantage_max_to_bound",
        "critic/advantages/max / ((n - 1) / sqrt(n))",
        _GRPO,
        "1: a group with one success only; above 1: another n, merged groups, not normalised",
        "Samuelson's inequality",
    ),
    Described(
        "grpo/advantage_min_to_bound",
        "-critic/advantages/min / ((n - 1) / sqrt(n))",
        _GRPO,
        "1: a group with one failure only",
        "Samuelson's inequality",
    ),
    Described(
        "grpo/effective_prompt_ratio_at_most",
        "train_batch_size / (train/num_gen_batches * gen_batch_size); v1: train_batch_size /"
        " (train_batch_size + training/filter_groups/evicted_samples)",
        "filter_groups, the sizes in the configuration",
        "> 0.3 (rule)",
        "DAPO arXiv 2503.14476; verl PR 7082",
    ),
    Described(
        "entropy_fit/a",
        "a of R = -a e^H + b, by least squares over all rows up to here; R reward/mean, H"
        " actor/entropy",
        _FIT,
        "> 0: reward is bought with entropy",
        "arXiv 2505.22617 (there R is a validation's); thresholds of evidence are a rule",
        "score",
        since=2,
    ),
    Described("entropy_fit/b", "b of the same", _FIT, "", "arXiv 2505.22617", "score", since=2),
    Described(
        "entropy_fit/ceiling",
        "b - a: the reward when no entropy is left",
        _FIT,
        "far above the present reward; near it: little is left to gain this way",
        "arXiv 2505.22617",
        "score",
        since=2,
    ),
    Described(
        "entropy_fit/explained",
        "R^2 of the same: what part of the reward's variance the entropy explains",
        _FIT,
        "",
        "statistics",
        since=2,
    ),
    Described(
        "val_gap/{SOURCE}",
        "mean of critic/score/mean over up to 10 rows - mean reward of the validation"
        " (val-core or val-aux SOURCE/reward/mean@N, the largest N; val/test_score/SOURCE)",
        "validations of the reward; 5 rows with critic/score/mean before. Not from acc: it is"
        " another scale",
        "steady; widening: overfitting or reward hacking. A level above or below 0 is normal:"
        " validation may be greedy and of other data",
        "practice",
        "score",
        since=2,
    ),
    Described(
        "timing_share/{PHASE}",
        "timing_s/PHASE / total; total = timing_s/step + what its version leaves out (testing from"
        " 0.6.0 on, save_checkpoint in 0.6.0 - 0.7.0)",
        "timing_s/step, generation and training in turn",
        "gen 0.5-0.8 is common for long answers (rule)",
        "verl timers; verl issue 3116",
        since=2,
    ),
    Described(
        "timing_share/rest",
        "(timing_s/step - all phases within it) / total; parts of phases (agent_loop/*,"
        " generate_sequences, reshard) are never added",
        "timing_s/step, generation and training in turn",
        "< 0.1 (rule): above, driver, data loading or transfers cost",
        "verl timers",
        since=2,
    ),
    Described(
        "rollout/tokens_per_second",
        "1000 / timing_per_token_ms/gen; N * response_length/mean / timing_s/gen, N as for"
        " rollout/latency_ms",
        "generation and training in turn, no groups dropped",
        "no halving against the run's own past",
        "definition",
        "tokens/s, all GPUs",
        since=2,
    ),
    Described(
        "perf/mfu/actor",
        "mfu/actor of verl 0.2, where it is above 0 and at most 1",
        "it",
        "0.2-0.5 for dense models on GPUs that verl knows (rule); 0 or above 1: not computable",
        "PaLM arXiv 2204.02311; verl issues 1076, 1208, 4025",
        since=2,
    ),
    Described(
        "off_policy/evicted_share",
        "training/off_policy/evicted_samples / (it + train_batch_size), in groups; 0 where it is"
        " not logged",
        "v1 trainer of verl 0.9 or later, data.train_batch_size",
        "near 0; above 0.1 generation is wasted (rule)",
        "verl v1: drops samples of more than 8 versions",
        since=2,
    ),
    Described(
        "off_policy/failed_share",
        "training/rollout_failure/evicted_samples / (it + train_batch_size), in groups; 0 where it"
        " is not logged",
        "v1 trainer of verl 0.9 or later, data.train_batch_size",
        "0",
        "rule",
        since=2,
    ),
    Described(
        "off_policy/stale_share",
        "increase of fully_async/count/stale_trajectory_processed since the step before / N; N ="
        " round(perf/total_num_tokens / (prompt_length/mean + response_length/mean)), else"
        " ppo_mini_batch_size * require_batches * trigger_parameter_sync_step * rollout.n",
        "fully-async trainer, the step before",
        "below staleness_threshold / (1 + staleness_threshold) as configured (rule)",
        "verl fully_async documentation; AReaL arXiv 2505.24298",
        since=2,
    ),
    Described(
        "health/{CODE}",
        "0: the rule does not hold, 1: it does (warning), 2: critical",
        "the series of the rule",
        "0",
        "rules.toml",
        "level",
    ),
    Described(
        "health/worst", "the highest of all health/{CODE} of the step", "any", "0", "", "level"
    ),
)
