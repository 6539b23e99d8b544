from trainwright.profilers.actions import AdvancedProfiler as AdvancedProfiler
from trainwright.profilers.actions import SimpleProfiler as SimpleProfiler
from trainwright.profilers.profiler import PROFILERS as PROFILERS
from trainwright.profilers.profiler import PassThroughProfiler as PassThroughProfiler
from trainwright.profilers.profiler import Profiler as Profiler
from trainwright.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
