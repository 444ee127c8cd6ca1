"""Pictures and pages: every chart that Myriad draws, and the HTML report of a run."""
