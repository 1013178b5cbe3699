"""Posterior queries of an HMM, by topic: decoding, prediction, dwell times, residuals, segments."""

from .decoding import expected_visits as expected_visits
from .decoding import k_best as k_best
from .decoding import path_entropy as path_entropy
from .dwell_times import Segment as Segment
from .dwell_times import dwell_counts as dwell_counts
from .dwell_times import dwell_time_hazard as dwell_time_hazard
from .dwell_times import dwell_time_log_prob as dwell_time_log_prob
from .dwell_times import dwell_time_log_survival as dwell_time_log_survival
from .dwell_times import dwell_time_mean as dwell_time_mean
from .dwell_times import segments as segments
from .prediction import continuation as continuation
from .prediction import impute as impute
from .prediction import observation_marginals as observation_marginals
from .prediction import predictive_log_prob as predictive_log_prob
from .residuals import PseudoResiduals as PseudoResiduals
from .residuals import pseudo_residuals as pseudo_residuals
