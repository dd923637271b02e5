"""Choose settings for a text, a machine and a number of minutes.

`textmill new`   inspect_text.py and probe_machine.py measure the text and the machine, plan.py turns that into a plan,
                 project_file.py writes the YAML file
`textmill tune`  trials.py decides what to try, tuning.py runs the trials
`textmill run`   verdict.py says how good the finished model is
"""
