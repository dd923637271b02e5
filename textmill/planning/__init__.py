"""Choose settings for a text, a machine and a number of minutes.

`textmill new`   inspect_text.py and probe_machine.py measure facts.py; plan.py turns them into a plan, forecast.py says
                 what other minutes would bring, project_file.py writes the YAML file
`textmill tune`  trials.py decides what to try, tuning.py runs the trials, tuned_file.py writes the best settings
`textmill run`   verdict.py says how good the finished model is
"""
