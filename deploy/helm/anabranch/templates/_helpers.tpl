{{- define "anabranch.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "anabranch.selector" -}}
app.kubernetes.io/name: anabranch
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "anabranch.labels" -}}
{{ include "anabranch.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "anabranch.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* What cannot be: said before anything is installed. */}}
{{- define "anabranch.check" -}}
{{- if gt (int .Values.replicas) 1 }}
{{- if not .Values.database.existingSecret }}
{{- fail "replicas: a standby needs PostgreSQL: name a Secret with its address in database.existingSecret" }}
{{- end }}
{{- if and (not .Values.insecure) (not .Values.identity.existingClaim) }}
{{- fail "replicas: a server and its standby share one authority: name a volume that all can write in identity.existingClaim" }}
{{- end }}
{{- if not .Values.model.existingClaim }}
{{- fail "replicas: all of them start from the same weights: name a volume that has them in model.existingClaim" }}
{{- end }}
{{- end }}
{{- if and (or .Values.metrics.serviceMonitor .Values.metrics.prometheusRule) (not .Values.metrics.enabled) }}
{{- fail "metrics.serviceMonitor, metrics.prometheusRule: there is nothing to be read without metrics.enabled" }}
{{- end }}
{{- end }}
